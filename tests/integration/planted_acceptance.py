"""Runs a part of the acceptance with a fault: it computes wrongly, fails, or never ends."""

import itertools
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


def learn_wrongly() -> None:
    """Run the part, whose second training has another learning rate."""
    from tests.gpu_acceptance import same_numbers

    train, number = same_numbers.train_losses, itertools.count()

    def other(place, split, device, values, begin):
        wrong = values | {"lr": values["lr"] * (1 + next(number))}
        return train(place, split, device, wrong, begin)

    same_numbers.train_losses = other
    run_part.main()


FAULTS = {"losses": learn_wrongly, "readers": fail, "device": hang, "trace": crash}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
