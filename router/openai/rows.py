"""The rows of one body, and what their values become."""

from __future__ import annotations

from typing import Any

from router.openai.fields import Object, Scope

MAX_SEED = (1 << 64) - 1


class Rows:
    """Rows with their defaults and targets (`Field.becomes`)."""

    def __init__(self, rows: Object) -> None:
        self._rows = rows
        self._defaults = {field.name: field.default for field in rows.fields if field.default is not None}
        targets = [(field.name, field.becomes) for field in rows.fields if field.becomes]
        self._sampling = [(name, to[len("sampling.") :]) for name, to in targets if to.startswith("sampling.")]
        self._others = [(name, to) for name, to in targets if "." not in to]

    def read(self, body: dict[str, Any], scope: Scope) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields that are given, and the same with the defaults of all others."""
        given = self._rows.read(body, "", scope)
        return given, {**self._defaults, **given}

    def sampling(self, values: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `SamplingParams`."""
        sampling = {to: values[name] for name, to in self._sampling if name in values}
        sampling["top_k"] = max(sampling.get("top_k", 0), 0)  # -1 is vLLM's word for off
        sampling["seed"] = sampling.get("seed", 0) & MAX_SEED
        return sampling

    def others(self, values: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `ParsedRequest` that are values of fields."""
        return {to: values[name] for name, to in self._others if name in values}
