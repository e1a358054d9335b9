"""AdamW whose moments lie in the host's memory, and visit the device a page at a time.

Source: Dettmers et al. 2023, "QLoRA", whose paged optimizers leave it to CUDA's unified memory to
move a page when a kernel touches it. Here pages are copied ahead: while one is updated, the next
one arrives and the last one leaves, on a stream each way. The update is elementwise, so that its
result is the one of `torch.optim.AdamW` to the bit.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.adam import adam

from pipelines.models.weights import host_like, local

PAGE = 1 << 23  # numbers of a page: its moments take 64 MiB in fp32
PAGES = 3  # on the device at once: one arrives, one is updated, one leaves
_ALIGNED = 64  # numbers; a fused kernel reads several at once
_MOMENTS = ("exp_avg", "exp_avg_sq")
_Pairs = list[tuple[Tensor, Tensor]]


class _Piece(NamedTuple):
    """Some numbers of a parameter, and their place in a page."""

    parameter: nn.Parameter
    numbers: slice  # of the flat part that this process has
    place: slice
    is_last: bool  # of its parameter


class PagedAdamW(AdamW):
    """A fused AdamW for parameters on `device`, whose moments are tensors of the host.

    They have the weights' shapes and placements, and the names of AdamW's, so that checkpoints do
    not know the difference.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        device: torch.device,
    ) -> None:
        """Divide the parameters into pages.

        Args:
            groups: As of AdamW; all parameters have one type, and are contiguous on each process.
            lr: The learning rate.
            betas: AdamW's.
            device: Of the update. On a CPU, pages are copied within its memory.
        """
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        self._device = device
        self._pages = [
            (group, page) for group in self.param_groups for page in _pages(group["params"])
        ]
        self._arriving, self._leaving = _Lane(device), _Lane(device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is not supported."""
        if closure is not None:
            raise ValueError(f"{type(self).__name__}.step takes no closure")
        for _, page in self._pages:
            self._make_moments(page)
        slots, begun = self._slots(), _now(self._device)
        fetched = [self._fetch(0, slots, begun)]
        left: list[torch.Event | None] = []
        for number, (group, page) in enumerate(self._pages):
            if number + 1 < len(self._pages):
                # Its slot is the one of the page before the last one.
                free = left[number + 1 - PAGES] if number + 1 >= PAGES else begun
                fetched.append(self._fetch(number + 1, slots, free))
            pairs, arrived = fetched[number]
            _wait(arrived)
            self._update(group, page, slots[number % PAGES])
            left.append(self._leaving.copy(pairs, _now(self._device)))
        _wait(left[-1])  # what uses the slots' memory next comes after

    def _make_moments(self, page: list[_Piece]) -> None:
        for parameter, *_ in page:
            if not self.state[parameter]:
                is_apart = self._device.type != "cpu"
                self.state[parameter] = {
                    "step": torch.zeros((), device=self._device),
                    **{name: host_like(parameter, pinned=is_apart).zero_() for name in _MOMENTS},
                }

    def _slots(self) -> list[Tensor]:
        """Return memory on the device, [moments, numbers], for each page that is there at once."""
        dtype = self._pages[0][1][0].parameter.dtype
        ends = [page[-1].place.stop for _, page in self._pages]
        return [
            torch.empty(len(_MOMENTS), max(ends[slot::PAGES]), dtype=dtype, device=self._device)
            for slot in range(min(PAGES, len(ends)))
        ]

    def _fetch(
        self, number: int, slots: list[Tensor], after: "torch.Event | None"
    ) -> "tuple[_Pairs, torch.Event | None]":
        """Begin to copy a page; return its moments on the host and in its slot, and the end."""
        pairs = [
            (local(self.state[parameter][name]).view(-1)[numbers], moments[place])
            for parameter, numbers, place, _ in self._pages[number][1]
            for name, moments in zip(_MOMENTS, slots[number % PAGES], strict=True)
        ]
        return pairs, self._arriving.copy([(slot, host) for host, slot in pairs], after)

    def _update(self, group: dict[str, Any], page: list[_Piece], slot: Tensor) -> None:
        pieces = [each for each in page if each.parameter.grad is not None]
        steps = [self.state[each.parameter]["step"] for each in pieces]
        adam(
            [local(each.parameter).view(-1)[each.numbers] for each in pieces],
            [local(each.parameter.grad).reshape(-1)[each.numbers] for each in pieces],  # type: ignore[arg-type]
            [slot[0, each.place] for each in pieces],
            [slot[1, each.place] for each in pieces],
            [],
            # It counts them up; a parameter's pieces are of the same step.
            [s if each.is_last else s.clone() for s, each in zip(steps, pieces, strict=True)],
            fused=True,
            found_inf=getattr(self, "found_inf", None),
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _pages(parameters: Iterable[nn.Parameter]) -> Iterator[list[_Piece]]:
    """Divide parameters into pages; one without a number here has an empty piece."""
    page: list[_Piece] = []
    place = 0
    for parameter in parameters:
        size, done = local(parameter).numel(), 0
        while not page or page[-1].parameter is not parameter or done < size:
            if place == PAGE:
                yield page
                page, place = [], 0
            taken = min(size - done, PAGE - place)
            numbers, there = slice(done, done + taken), slice(place, place + taken)
            done += taken
            page.append(_Piece(parameter, numbers, there, done == size))
            place += -(-taken // _ALIGNED) * _ALIGNED
    if page:
        yield page


class _Lane:
    """Copies one way beside the device's work; on a CPU, before they return."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def copy(self, pairs: _Pairs, after: "torch.Event | None") -> "torch.Event | None":
        """Copy the second of each pair to the first, after an event; return that of their end."""
        if self._stream is None or after is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_event(after)
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()


def _now(device: torch.device) -> "torch.Event | None":
    """Return an event for all work that the device was given so far; None on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream().record_event()


def _wait(event: "torch.Event | None") -> None:
    """Let the device's further work wait; the host does not."""
    if event is not None:
        torch.accelerator.current_stream().wait_event(event)
