"""Runs a part of the acceptance with a fault: it computes wrongly, fails, or never ends."""

import itertools
import multiprocessing
import os
import signal
import sys
import time

from tests.gpu_acceptance import run_part


def hang() -> None:
    """Run for longer than any test waits."""
    time.sleep(3600)


def fail() -> None:
    """Fail as a part whose drive is gone does."""
    raise OSError("the drive is gone")


def crash() -> None:
    """End as a process does that a driver or the kernel ends."""
    os.kill(os.getpid(), signal.SIGSEGV)


def fork() -> None:
    """Run the part, whose work is a process that closes its stdin, as a data loader's does."""
    from tests.gpu_acceptance import training_speed
    from tests.gpu_acceptance.acceptance_parts import Outcome

    def work(place):
        time.sleep(1)  # until the thread waits for the starter's end
        worker = multiprocessing.get_context("fork").Process(target=sys.stdin.close)
        worker.start()
        worker.join()
        return Outcome(worker.exitcode, "as exit code", None, worker.exitcode == 0, "")

    training_speed.fp8 = work
    run_part.main()


def learn_wrongly() -> None:
    """Run the part, whose second training has another learning rate."""
    from tests.gpu_acceptance import same_numbers

    train, number = same_numbers.train_losses, itertools.count()

    def other(place, split, device, values, begin):
        wrong = values | {"lr": values["lr"] * (1 + next(number))}
        return train(place, split, device, wrong, begin)

    same_numbers.train_losses = other
    run_part.main()


FAULTS = {
    "losses": learn_wrongly,
    "readers": fail,
    "device": hang,
    "trace": crash,
    "fp8": fork,
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
