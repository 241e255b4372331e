"""A router whose model knows tools, as Hermes and Qwen do, with workers that say what a test wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.router_site import EOS, Site, opened_site, write_checkpoint

TOOL_TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
#: As a model writes a call of it.
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Kyōto"}}\n</tool_call>'
ARGUMENTS = '{"city": "Kyōto"}'


@contextlib.contextmanager
def opened_tool_site(
    directory: Path,
    overrides: dict[str, Any] | None = None,
    *,
    template: str = TOOL_TEMPLATE,
    specials: Sequence[str] = (),
) -> Iterator[Site]:
    checkpoint = write_checkpoint(directory / "toy", context=8192, template=template, specials=specials)
    with opened_site(checkpoint, overrides, max_context=8192) as site:
        yield site


def says(site: Site, text: str) -> None:
    """Its model answers with `text` and ends."""
    tokens = [*text.encode(), EOS]
    site.prefill.script = site.decode.script = lambda prompt, choice, index: tokens[min(index, len(tokens) - 1)]


def prompt_of(site: Site, number: int = 1) -> str:
    """The text of the prompt that the workers got as the `number`-th."""
    return bytes(i for i in site.prefill.wait_for("start", number).prompt_ids if i < 256).decode()
