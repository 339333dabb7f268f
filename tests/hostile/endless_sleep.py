# Sleeps for ever with all signals blocked; uses no CPU time.
import signal
import time

signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))


def solve(facts):
    while True:
        time.sleep(1000)
