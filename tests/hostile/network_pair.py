# Uses the pair of sockets that asyncio gets to reach others: by a new connection, by an address, by passing descriptors.
import array
import socket


def solve(facts):
    found = []
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        except OSError:
            continue
        for attempt in (
            lambda: ours.connect("\0" + facts["mark"]),
            lambda: ours.bind("\0" + facts["mark"]),
            lambda: ours.sendto(b"x", "/dev/log"),
            lambda: ours.sendto(b"x", "\0" + facts["mark"]),
            lambda: theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]),
            lambda: socket.create_connection(("127.0.0.1", facts["port"]), 1.0).recv(100).decode(),
            lambda: socket.socketpair(socket.AF_INET),
            lambda: ours.listen(),
        ):
            try:
                found.append(attempt())
            except (OSError, ValueError):
                pass
    return f"broke out: {found}" if found else "nothing"
