# Uses the right to write in its own folder on files outside: moves, links, truncates and re-labels them from there.
import os
import shutil


def solve(facts):
    path, folder = facts["canary"], facts["folder"]
    with open("own", "w") as file:
        file.write("x")
    for harm in (
        lambda: os.rename(path, "stolen"),
        lambda: os.rename("own", path),
        lambda: os.replace("own", folder + "/new"),
        lambda: os.link(path, "linked"),
        lambda: os.symlink(path, "link") or open("link", "a").write("x"),
        lambda: open(os.open(path, os.O_RDONLY | os.O_TRUNC)).close(),
        lambda: os.truncate(path, 0),
        lambda: shutil.copyfile("own", path),
        lambda: os.chmod("own", 0o4777) or shutil.move("own", folder),
        lambda: os.chdir(folder) or os.mkdir("new") or os.rmdir("new"),
        lambda: os.unlink(path),
    ):
        try:
            harm()
        except OSError:
            pass
    return open("stolen").read() if os.path.exists("stolen") else "done"
