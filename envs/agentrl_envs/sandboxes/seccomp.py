"""Which calls of the kernel a sandbox goes without: those that namespaces and limits do not hold, as a filter of seccomp."""

import errno
import struct
from collections.abc import Iterator
from functools import cache

# Offsets into what the filter sees of a call: its number, the architecture, the lower half of its first argument.
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000

_NEW_NAMESPACE = 0x7E020000 | 0x00000080
"""The flags of `clone` that make a namespace."""
_FAMILIES = (1, 2, 10)
"""Sockets that the namespace of the network holds: unix, inet, inet6. Others (vsock, alg, ...) reach the host or its kernel."""
_X32 = 0x40000000
"""On x86-64, calls from here on are those of another table."""

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Number on x86-64, number on aarch64.
_CALLS = {
    # Memory that belongs to no process, so that no limit of one counts it.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Keys of the user, which no namespace keeps apart.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Other processes, and what holds this one.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Parts of the kernel that few programs need and many holes were in.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)


def architectures() -> list[str]:
    """List the machines (as `platform.machine()` names them) that there are numbers for."""
    return list(_ARCHITECTURES)


@cache
def seccomp_filter(machine: str) -> bytes:
    """Return the filter, as the kernel takes it, for a machine as `platform.machine()` names it."""
    architecture, which = _ARCHITECTURES[machine]
    return b"".join(_program(architecture, which, has_x32=machine == "x86_64"))


def _program(architecture: int, which: int, *, has_x32: bool) -> Iterator[bytes]:
    """Yield one instruction after the other; a jump's two numbers are instructions to skip where it holds, and where not."""
    refuse = _step(_RETURN, _ERROR | errno.EPERM)
    yield _step(_LOAD, _ARCHITECTURE)
    yield _step(_JUMP_EQUAL, architecture, 1, 0)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, _NUMBER)
    if has_x32:
        yield _step(_JUMP_AT_LEAST, _X32, 0, 1)
        yield refuse
    for numbers in _CALLS.values():
        yield _step(_JUMP_EQUAL, numbers[which], 0, 1)
        yield refuse
    # Its flags are in memory, where no filter looks; where it is missing, C libraries use `clone`.
    yield _step(_JUMP_EQUAL, _CLONE3[which], 0, 1)
    yield _step(_RETURN, _ERROR | errno.ENOSYS)
    yield _step(_JUMP_EQUAL, _CLONE[which], 0, 4)
    yield _step(_LOAD, _FIRST)
    yield _step(_JUMP_ANY_BIT, _NEW_NAMESPACE, 0, 1)
    yield refuse
    yield _step(_RETURN, _ALLOW)
    yield _step(_JUMP_EQUAL, _SOCKET[which], 1, 0)
    yield _step(_JUMP_EQUAL, _SOCKETPAIR[which], 0, 2 + len(_FAMILIES))
    yield _step(_LOAD, _FIRST)
    for at, family in enumerate(_FAMILIES):
        yield _step(_JUMP_EQUAL, family, len(_FAMILIES) - at, 0)
    yield _step(_RETURN, _ERROR | errno.EAFNOSUPPORT)
    yield _step(_RETURN, _ALLOW)


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)
