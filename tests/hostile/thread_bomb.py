# Starts threads without end.
import _thread
import threading
import time


def solve(facts):
    threading.stack_size(1 << 16)
    while True:
        try:
            _thread.start_new_thread(time.sleep, (1000,))
        except RuntimeError:
            time.sleep(0)
