# Runs other programs.
import os
import subprocess


def solve(facts):
    for way in (
        lambda: subprocess.run(["cat", facts["canary"]], capture_output=True, text=True).stdout,
        lambda: subprocess.getoutput(f"cat {facts['canary']}"),
        lambda: os.popen(f"/bin/cat {facts['canary']}").read(),
        lambda: os.system(f"rm -f {facts['canary']}") or "",
        lambda: os.posix_spawn("/bin/rm", ["rm", "-f", facts["canary"]], {}) and "",
        lambda: os.execv("/bin/rm", ["rm", "-f", facts["canary"]]),
    ):
        try:
            found = way()
            if facts["mark"] in found:
                return found
        except Exception:
            pass
    return "nothing"
