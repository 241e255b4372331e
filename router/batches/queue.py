"""The parts of one router's batches, put together."""

from __future__ import annotations

from pathlib import Path

from router.batches.leader import BatchLeader
from router.batches.lines import LineRules
from router.batches.room import Room
from router.batches.run import Ask, BatchRun
from router.batches.store import BatchFolder, Store
from router.openai.model_card import ModelCard
from router.policy.background import BackgroundAdmission
from tandem.core.config import Config


class BatchQueue:
    """Made once by a router's server, where `batches.directory` is set.

    Attributes:
        admission: of the requests of batches.
        asks: how they are served; set before `leader` starts.
    """

    asks: Ask

    def __init__(self, config: Config, card: ModelCard, admission: BackgroundAdmission) -> None:
        """Raises `ConfigError`: the directory cannot be used."""
        self.admission = admission
        self.store = Store(Path(config.batches.directory))
        self._config, self._card = config, card
        self._room = Room(admission)
        self.leader = BatchLeader(self.store, self._run)

    def _run(self, folder: BatchFolder) -> BatchRun:
        return BatchRun(folder, self.store, self._rules, self._room, self.asks)

    def _rules(self, endpoint: str) -> LineRules:
        config = self._config
        return LineRules(endpoint, self._card, config.batches.max_requests, config.limits.max_body_bytes)
