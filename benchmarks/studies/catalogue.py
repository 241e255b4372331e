"""All studies, in the order of the page."""

from __future__ import annotations

from benchmarks.studies import (
    batching,
    chunk_size,
    link,
    memory,
    mixed_pool,
    page_size,
    several_routers,
    slow_link,
    split,
    worker_dies,
)
from benchmarks.studies.study import Study

STUDIES: tuple[Study, ...] = (
    batching.STUDY,
    memory.STUDY,
    page_size.STUDY,
    chunk_size.STUDY,
    split.STUDY,
    mixed_pool.STUDY,
    link.STUDY,
    slow_link.STUDY,
    worker_dies.STUDY,
    several_routers.STUDY,
)
