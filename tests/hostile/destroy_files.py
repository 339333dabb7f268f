# Removes, renames, links, truncates and re-labels files outside.
import os
import shutil


def solve(facts):
    path, folder = facts["canary"], facts["folder"]
    for harm in (
        lambda: os.truncate(path, 0),
        lambda: os.chmod(path, 0o777),
        lambda: os.utime(path, (0, 0)),
        lambda: os.rename(path, path + ".moved"),
        lambda: os.link(path, path + ".link"),
        lambda: os.symlink(path, path + ".symlink"),
        lambda: os.setxattr(path, "user.x", b"y"),
        lambda: os.remove(path),
        lambda: os.mkdir(folder + "/new"),
        lambda: os.mkfifo(folder + "/pipe"),
        lambda: os.chmod(folder, 0o700),
        lambda: shutil.rmtree(folder),
    ):
        try:
            harm()
        except OSError:
            pass
    return "done"
