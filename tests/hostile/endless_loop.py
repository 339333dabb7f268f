# Loops for ever, deaf to every signal and every exception.
import signal

for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))


def solve(facts):
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue
