"""The data of one rank: checked when it is made, prepared ahead once it is started."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prl.config.schema import SftConfig
from prl.model_config import vocab_size
from prl.packing import Cost
from prl_trainer_fsdp.sft.prefetch import Prefetcher, Process
from prl_trainer_fsdp.sft.rendering import choose, load_tokenizer
from prl_trainer_fsdp.sft.sources import open_sources
from prl_trainer_fsdp.sft.steps import Part, Preparer
from prl_trainer_fsdp.sft.worker import Orders, training_order

log = logging.getLogger(__name__)


class Feed:
    """Opens and checks the sources. `steps` is how many the run has.

    Raises:
        ConfigError: a source cannot be read, lacks columns or holds bad rows, or one of the longest rows is too long.
        EnvironmentNotFit: a library that is needed is not installed.
    """

    def __init__(self, config: SftConfig) -> None:
        self._config = config
        data = config.data
        skip = data.on_bad_row == "skip"
        self._train = open_sources([*data.train, *data.eval], skip=skip)
        self._eval = [self._train.pop() for _ in data.eval][::-1]
        self.sizes = [len(source) for source in self._train]
        self.order = training_order(data, self.sizes, config.seed)
        self.steps = data.steps or self.order.steps
        self._renderer = choose(load_tokenizer(config.model.path), config.model.path, data.renderer)
        log.info("conversations become tokens by %s; %d steps", self._renderer.name, self.steps)
        self._preparer(0, 1, None).check_longest([*self._train, *self._eval])
        self._prefetcher: Prefetcher | None = None
        self.waited = 0.0

    @property
    def has_eval(self) -> bool:
        return bool(self._eval)

    @property
    def bad_rows(self) -> int:
        """Left out when the sources were checked."""
        return sum(source.skipped for source in [*self._train, *self._eval])

    @property
    def renderer(self) -> str:
        """What makes tokens of conversations."""
        return self._renderer.name

    def start(self, first: int, rank: int, ranks: int, cost: Cost, *, ahead: bool = True) -> None:
        """Begin to prepare the steps from `first` on for one of the data-parallel ranks; without `ahead`, none."""
        self._own = self._preparer(rank, ranks, cost)
        if not ahead:
            return
        workers: list[Callable[[int], Part]] = [self._own.step]
        if self._config.data.workers and first <= self.steps:
            orders = self._orders(rank, ranks, cost)
            workers = [Process(orders) for _ in range(self._config.data.workers)]
        self._prefetcher = Prefetcher(workers, first, self.steps, self._config.data.prefetch)

    def take(self, step: int) -> Part:
        """This rank's rows of a step; `waited` is then the seconds that they were waited for.

        Raises:
            ConfigError, RunFailed: they could not be prepared.
        """
        assert self._prefetcher is not None, "not started"
        part, self.waited = self._prefetcher.take(step)
        return part

    def evaluation(self) -> Part:
        """This rank's rows of all held-out examples."""
        return self._own.evaluation(self._eval)

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _preparer(self, rank: int, ranks: int, cost: Cost | None) -> Preparer:
        config = self._config
        return Preparer(
            config.data,
            self._train,
            self.order,
            self._renderer,
            config.trainer.row_tokens,
            rank,
            ranks,
            cost,
            vocab_size(config.model.path),
        )

    def _orders(self, rank: int, ranks: int, cost: Cost) -> Orders:
        config = self._config
        return Orders(
            data=config.data.model_dump_json().encode(),
            model=config.model.path,
            row_tokens=config.trainer.row_tokens,
            seed=config.seed,
            rank=rank,
            ranks=ranks,
            indices=[source.index.tobytes() for source in self._train],
            cost=(cost.linear, cost.quadratic),
        )
