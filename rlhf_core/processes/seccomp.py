"""seccomp filters of the system calls that a sandbox permits.

Code has an allow-list: all other calls fail with EPERM, so that there are no sockets, processes, threads, signals,
devices or shared memory, and nothing outlives the process. File access is left to Landlock (sandbox_process.py).
Commands have a deny-list, within namespaces of their own (command_process.py).
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

from rlhf_core.errors import StageError

# Number of each call on x86_64 and on aarch64; None: that architecture has no such call.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233),
    "dup": (32, 23), "dup2": (33, None), "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93),
    "uname": (63, 160), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46),
    "getdents": (78, None), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None),
    "rmdir": (84, None), "unlink": (87, None), "readlink": (89, None),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "readlinkat": (267, 78),
    "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99), "dup3": (292, 24),
    "preadv": (295, 69), "pwritev": (296, 70), "getcpu": (309, 168), "renameat2": (316, 276), "getrandom": (318, 278),
    "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
_ANY = 0xFFFFFFFFFFFFFFFF  # the mask of a whole argument
_NO_SET_UID, _OPEN_FOLDER = (0o7000, 0), (0o700, 0o700)  # mask and value of a mode
_OPEN, _OPENAT, _MKDIR, _MKDIRAT = (2, None), (257, 56), (83, None), (258, 34)
_FCNTL, _IOCTL, _PRLIMIT, _CLONE3 = (72, 25), (16, 29), (302, 261), (435, 435)
_TERMINAL_SETTINGS = 0x5401  # TCGETS, by which Python checks for a terminal
_FCNTL_COMMANDS = (0, 1, 2, 3, 6, 7, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETLK, F_SETLKW, F_DUPFD_CLOEXEC
_SET_FLAGS, _ASYNC = 4, 0o20000  # F_SETFL, O_ASYNC
# Allowed if, for each (place, mask, value), the argument's bits in `mask` are `value`; several lines of a call: if one
# of them holds. Of fcntl nothing by which the kernel sends a signal (F_SETOWN, F_SETSIG, F_NOTIFY, F_SETLEASE), and not
# F_GETLK, which shows the locks of other processes. A folder that its owner cannot enter could not be looked into from
# outside, and umask, which could make one, is not on the list.
_CONDITIONS: list[tuple[tuple[int | None, int | None], list[tuple[int, int, int]]]] = [
    (_OPEN, [(2, *_NO_SET_UID)]), (_OPENAT, [(3, *_NO_SET_UID)]),
    (_MKDIR, [(1, *_OPEN_FOLDER)]), (_MKDIRAT, [(2, *_OPEN_FOLDER)]),
    *((_FCNTL, [(1, _ANY, command)]) for command in _FCNTL_COMMANDS),
    (_FCNTL, [(1, _ANY, _SET_FLAGS), (2, _ASYNC, 0)]),
    (_IOCTL, [(1, _ANY, _TERMINAL_SETTINGS)]),
    (_PRLIMIT, [(0, _ANY, 0), (2, _ANY, 0)]),  # pid 0, new NULL: own limits may be read, not set
]  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH

# Calls that no command needs and that reach what namespaces do not separate, or undo the separation.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "ptrace": (101, 117), "syslog": (103, 116),
    "uselib": (134, None), "personality": (135, 92), "ustat": (136, None), "sysfs": (139, None),
    "vhangup": (153, 58), "modify_ldt": (154, None), "pivot_root": (155, 41), "_sysctl": (156, None),
    "adjtimex": (159, 171), "chroot": (161, 51), "acct": (163, 89), "settimeofday": (164, 170), "mount": (165, 40),
    "umount2": (166, 39), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "iopl": (172, None),
    "ioperm": (173, None), "create_module": (174, None), "init_module": (175, 105), "delete_module": (176, 106),
    "quotactl": (179, 60), "lookup_dcookie": (212, 18), "clock_settime": (227, 112), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "get_mempolicy": (239, 236), "mq_open": (240, 180), "kexec_load": (246, 104),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "migrate_pages": (256, 238),
    "unshare": (272, 97), "move_pages": (279, 239), "perf_event_open": (298, 241), "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "clock_adjtime": (305, 266), "setns": (308, 268),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "finit_module": (313, 273),
    "memfd_create": (319, 279), "kexec_file_load": (320, 294), "bpf": (321, 280), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "pidfd_getfd": (438, 438), "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443), "memfd_secret": (447, 447),
}  # fmt: skip
_NEWER = 450  # and later numbers: calls that the list above does not know
_CLONE, _SOCKET, _SOCKETPAIR = (56, 220), (41, 198), (53, 199)
_NEW_NAMESPACES = 0x7E020000  # flags of clone
# Calls that are denied but for these arguments: no new namespace; sockets of files and of IP, of its own loopback.
_EXCEPTIONS: list[tuple[tuple[int | None, int | None], list[list[tuple[int, int, int]]]]] = [
    (_CLONE, [[(0, _NEW_NAMESPACES, 0)]]),
    *((each, [[(0, _ANY, family)] for family in (1, 2, 10)]) for each in (_SOCKET, _SOCKETPAIR)),
]

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF: ld [k]; and; jeq; jge; ret
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSED, _ABSENT = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def seccomp_filter() -> bytes:
    """Return struct sock_filter[] for code on this machine. Raises StageError for an architecture without a table."""
    column, program = _begun("code")
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            program += _returned(number, _ALLOW)
    # glibc tries clone3 first, and clone only if the kernel has no clone3.
    program += _returned(_CLONE3[column], _ABSENT)
    for numbers, tests in _CONDITIONS:
        if (number := numbers[column]) is not None:
            program += _allowed_if(number, tests)
    return _packed([*program, (_RETURN, 0, 0, _REFUSED)])


def command_filter() -> bytes:
    """Return struct sock_filter[] for commands on this machine. Raises StageError as `seccomp_filter`."""
    column, program = _begun("a command")
    for numbers in _DENIED.values():
        if (number := numbers[column]) is not None:
            program += _returned(number, _REFUSED)
    program += _returned(_CLONE3[column], _ABSENT)  # its flags are in memory, which no filter reads
    for numbers, alternatives in _EXCEPTIONS:
        number = numbers[column]
        assert number is not None
        for tests in alternatives:
            program += _allowed_if(number, tests)
        program += [(_LOAD, 0, 0, _NUMBER), *_returned(number, _REFUSED)]  # an argument may be loaded
    program += [(_AT_LEAST, 0, 1, _NEWER), (_RETURN, 0, 0, _ABSENT)]
    return _packed([*program, (_RETURN, 0, 0, _ALLOW)])


def _begun(what: str) -> tuple[int, list[tuple[int, int, int, int]]]:
    """Return the column of the tables, and the beginning of a program: it ends with the call's number loaded."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise StageError(
            f"{what} is confined on {', '.join(_ARCHITECTURES)}, and this node is {machine}: run the stage on another "
            "node, or leave out what runs code"
        )
    column, architecture = _ARCHITECTURES[machine]
    return column, [
        (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSED),  # x32, whose numbers mean other calls
    ]  # fmt: skip


def _returned(number: int, result: int) -> list[tuple[int, int, int, int]]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, result)]


def _packed(program: Sequence[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _allowed_if(number: int, tests: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Allow the call `number` if each of `tests` (place, mask, value) holds; otherwise continue with the next rule."""
    words = [
        (_ARGUMENTS + 8 * place + 4 * half, mask >> 32 * half & 0xFFFFFFFF, value >> 32 * half & 0xFFFFFFFF)
        for place, mask, value in tests
        for half in (0, 1)  # little-endian
        if mask >> 32 * half & 0xFFFFFFFF
    ]
    program = [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, 3 * len(words) + 1, number)]
    for left, (offset, mask, value) in zip(range(len(words) - 1, -1, -1), words, strict=True):
        program += [(_LOAD, 0, 0, offset), (_AND, 0, 0, mask), (_EQUAL, 0, 3 * left + 1, value)]
    return [*program, (_RETURN, 0, 0, _ALLOW)]
