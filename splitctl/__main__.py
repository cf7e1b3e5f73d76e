"""The entry of the process `splitctl`: what must be done before anything is imported that takes a while.

The kernel drops what it sends to the first process of a container while that has no handler, and gives it every
process whose parent died. So a first process does its work in a child, passes signals on and collects the dead.
"""

from __future__ import annotations

import os
import signal
import sys

_FIRST = 1
#: Of signals that a terminal sends to its whole foreground group, the child included.  Source: asm-generic/siginfo.h.
_SI_KERNEL = 0x80
_EXIT_OF_SIGNAL = 128
_EXIT_CANCELLED = 130


def main() -> int:
    """Run the command line on the arguments of the process; gives its exit status."""
    if os.getpid() == _FIRST:
        _go_on_below()
    try:
        from splitctl.cli import main as run  # noqa: PLC0415 - it imports for a tenth of a second
    except KeyboardInterrupt:
        return _EXIT_CANCELLED
    return run()


def _go_on_below() -> None:
    """Return in a child; the first process stays, and ends as the child does. There must be one thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child:
        os._exit(_follow(child))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(child: int) -> int:
    """Pass signals on until the child ends; gives its exit status, as a shell would."""
    while True:
        came = signal.sigwaitinfo(signal.valid_signals())
        if came.si_signo != signal.SIGCHLD:
            if came.si_code != _SI_KERNEL:
                os.kill(child, came.si_signo)
            continue
        # One signal may stand for several dead; the last of them is the child.
        while (dead := os.waitpid(-1, os.WNOHANG))[0]:
            if dead[0] == child:
                code = os.waitstatus_to_exitcode(dead[1])
                return code if code >= 0 else _EXIT_OF_SIGNAL - code


if __name__ == "__main__":
    sys.exit(main())
