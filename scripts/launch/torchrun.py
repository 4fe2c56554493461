"""Start the processes of a run like torchrun, but without its traceback after an error that a process has reported.

python scripts/launch/torchrun.py --standalone --nproc-per-node=2 train.py configs/demo_cpu.yaml train.epochs=1

All options are torchrun's; `python scripts/launch/torchrun.py --help` lists them below this text. If a process dies, all
processes are restarted, up to --max-restarts times. After an error in the configuration or data (status 78) nothing is
restarted, because the error would occur again. The exit status is 0 or 1, unless a signal ends torchrun itself, as a second
Ctrl-C may. `face train` starts it. It works from any folder.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Run torchrun with these arguments; return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]  # `python FILE` puts this folder first
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError
    from torch.distributed.launcher import api

    if {"-h", "--help"} & set(arguments[:1]):
        print(__doc__)
    api.LocalElasticAgent = agent_like(api.LocalElasticAgent)  # type: ignore[misc]
    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # killed by a signal, so it could not report anything itself
            print(f"error: the process of rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return 1
    except (SignalException, UnboundLocalError) as error:  # the other if the signal came before a stopwatch of torch had begun
        if not isinstance(error, SignalException) and not isinstance(error.__context__, SignalException):
            raise
        return 1
    except (RendezvousError, DistError) as error:
        text = str(error.__cause__ or error)  # the error itself only points to its cause
        said = (text.splitlines() or [f"not all have come in time; start the same command on each ({type(error).__name__})"])[0]
        if "EADDRINUSE" in text:
            said = "the port is in use by another run; choose one for all machines, --head HOST:PORT"
        elif isinstance(error, (RendezvousConnectionError, DistError)):
            said += "; the machine of --head ended or cannot be reached: start the command on all of them again"
        print(f"error: the machines cannot meet: {said}", file=sys.stderr)
        return 1
    finally:  # torch's handlers raise, so a second Ctrl-C while Python exits would print a traceback
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
    return 0


def can_forward_signals() -> bool:
    """Return whether this torchrun can pass signals such as SIGUSR1 on to its processes; older ones die of them."""
    from torch.distributed import run

    return any("--signals-to-handle" in action.option_strings for action in run.get_args_parser()._actions)


def agent_like(base: Any) -> Any:
    """Return a class like torchrun's agent, which starts and watches the processes, but for four things.

    - It starts nothing on fewer machines than asked for: torch leaves out one whose clock is 15 s late, and says nothing.
    - It restarts nothing after a process has exited with status 78 (EX_CONFIG of sysexits.h).
    - It lives until this process ends. Its keep-alive thread holds a reference to it. If that is the last one, the thread
      deletes the agent, which joins the keep-alive thread, that is, itself. That prints a traceback on stderr (torch 2.13).
    - It kills the processes at a second Ctrl-C, and does not send SIGTERM then, after which they save.
    """
    from torch.distributed.elastic.rendezvous import RendezvousError

    kept = []

    class Agent(base):
        def _rendezvous(self, group: Any) -> None:
            super()._rendezvous(group)
            least = getattr(getattr(group.spec.rdzv_handler, "_settings", None), "min_nodes", 1)
            if group.group_world_size < least:
                raise RendezvousError(f"only {group.group_world_size} of {least} came; set their clocks, 10 s apart at most")

        def run(self, *args: Any, **kwargs: Any) -> Any:
            kept.append(self)
            return super().run(*args, **kwargs)

        def _monitor_workers(self, group: Any) -> Any:
            result = super()._monitor_workers(group)
            if any(failure.exitcode == os.EX_CONFIG for failure in result.failures.values()):
                self._remaining_restarts = 0
            return result

        def _shutdown(self, death_sig: Any = signal.SIGTERM, **how: Any) -> None:
            try:
                super()._shutdown(death_sig, **how)
            except BaseException as error:  # torch's handler has raised it, in the wait for the processes
                if death_sig == signal.SIGINT == getattr(error, "sigval", None):
                    super()._shutdown(signal.SIGKILL, **how)
                raise

    return Agent


if __name__ == "__main__":
    raise SystemExit(main())
