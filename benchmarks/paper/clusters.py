"""The clusters of Splitwise's paper (Patel et al., ISCA 2024, section VI), and what it says of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.splitwise_oracle.runs import BOTH, MachineSpec

_CARDS = 8


@dataclass(frozen=True)
class Hardware:
    """A machine of eight cards.

    Attributes:
        name: in Splitwise's profile.
        cost, power: in the paper's units; only ratios count.
        tflops, gb_per_s: of all its cards, as makers tell them (dense, bfloat16).
    """

    name: str
    cost: float
    power: float
    tflops: float
    gb_per_s: float


A100 = Hardware("a100-80gb", 2.21, 24.8, _CARDS * 312, _CARDS * 2039)
H100 = Hardware("h100-80gb", 4.76, 44.0, _CARDS * 989, _CARDS * 3350)
#: With 0.7 of the power. In the profile its prompts take 1.3 times as long, and its tokens as long as before.
CAPPED = Hardware("h100-80gb-pcap", 4.76, 0.7 * 44.0, _CARDS * 989 / 1.3, _CARDS * 3350)


@dataclass(frozen=True)
class Design:
    """On what a cluster computes prompts, and on what tokens; where it is not split each machine does both."""

    name: str
    prompt: Hardware
    token: Hardware
    is_split: bool = True


DESIGNS = {
    design.name: design
    for design in (
        Design("Baseline-A100", A100, A100, is_split=False),
        Design("Baseline-H100", H100, H100, is_split=False),
        Design("Splitwise-AA", A100, A100),
        Design("Splitwise-HH", H100, H100),
        Design("Splitwise-HA", H100, A100),
        Design("Splitwise-HHcap", H100, CAPPED),
    )
}


@dataclass(frozen=True, order=True)
class Cluster:
    """So many machines of a design; one that is not split has no `num_token`."""

    design: str
    num_prompt: int
    num_token: int = 0

    def __str__(self) -> str:
        if not self.is_split:
            return f"{self.design} {self.num_prompt}"
        return f"{self.design} {self.num_prompt}P {self.num_token}T"

    @property
    def is_split(self) -> bool:
        return DESIGNS[self.design].is_split

    @property
    def num_machines(self) -> int:
        return self.num_prompt + self.num_token

    @property
    def cost(self) -> float:
        design = DESIGNS[self.design]
        return self.num_prompt * design.prompt.cost + self.num_token * design.token.cost

    @property
    def power(self) -> float:
        design = DESIGNS[self.design]
        return self.num_prompt * design.prompt.power + self.num_token * design.token.power

    @property
    def neighbours(self) -> tuple[Cluster, ...]:
        """With a machine more or less of one kind."""
        moves = [(1, 0), (-1, 0), *([(0, 1), (0, -1)] if self.is_split else [])]
        return tuple(Cluster(self.design, self.num_prompt + of_p, self.num_token + of_t) for of_p, of_t in moves)

    def machines(self) -> list[MachineSpec]:
        """In the original's order, which decides between equals: A100 or capped ones first, then prompts' machines."""
        design = DESIGNS[self.design]
        if not design.is_split:
            return [MachineSpec(number, design.prompt.name, BOTH) for number in range(self.num_prompt)]
        pools = [(design.prompt, "prompt", self.num_prompt), (design.token, "token", self.num_token)]
        if design.prompt != design.token:
            pools.reverse()
        kinds = [(hardware.name, home) for hardware, home, num in pools for _ in range(num)]
        return [MachineSpec(number, *kind) for number, kind in enumerate(kinds)]


WORKLOADS = ("conv", "code")

ISO_POWER, ISO_COST, ISO_THROUGHPUT = "iso-power", "iso-cost", "iso-throughput"
WRONG_WORKLOAD, BATCH = "wrong-workload", "batch"
SCENARIOS = (ISO_POWER, ISO_COST, ISO_THROUGHPUT, WRONG_WORKLOAD, BATCH)


def _clusters(a100: int, h100: int, *split: tuple[int, int]) -> tuple[Cluster, ...]:
    names = [name for name, design in DESIGNS.items() if design.is_split]
    return (
        Cluster("Baseline-A100", a100),
        Cluster("Baseline-H100", h100),
        *(Cluster(name, *nums) for name, nums in zip(names, split, strict=True)),
    )


#: By scenario and workload: AA, HH, HA and HHcap after the two that are not split.
CLUSTERS = {
    (ISO_POWER, "conv"): _clusters(70, 40, (45, 25), (25, 15), (25, 26), (25, 21)),
    (ISO_POWER, "code"): _clusters(70, 40, (55, 15), (35, 5), (35, 8), (35, 7)),
    (ISO_COST, "conv"): _clusters(86, 40, (51, 35), (25, 15), (30, 21), (30, 10)),
    (ISO_COST, "code"): _clusters(86, 40, (66, 20), (35, 5), (35, 10), (35, 7)),
}
#: The iso-power clusters of the other workload.
FOR_CODE = tuple(cluster for cluster in CLUSTERS[ISO_POWER, "code"] if cluster.is_split)


@dataclass(frozen=True)
class Claim:
    """A ratio of two clusters that the paper publishes; `what` is of `of` over that of `to`.

    Attributes:
        is_open: which workload it is, or which clusters, the text does not say; these are of those that fit whatever it
            says beside, such as "at a fifth less cost".
        rounding: by which what is published may differ from what was found.
    """

    scenario: str
    workload: str
    what: str  # "throughput", "cost", "power", "machines"
    of: str
    to: str
    published: float
    is_open: bool = False
    rounding: float = 0.005


def _open(scenario: str, what: str, of: str, to: str, published: float) -> tuple[Claim, ...]:
    """For each workload."""
    return tuple(Claim(scenario, workload, what, of, to, published, is_open=True) for workload in WORKLOADS)


_A, _H, _AA, _HH = "Baseline-A100", "Baseline-H100", "Splitwise-AA", "Splitwise-HH"
_HA, _HHCAP = "Splitwise-HA", "Splitwise-HHcap"

CLAIMS = (
    Claim(ISO_POWER, "conv", "throughput", _AA, _A, 2.15),
    Claim(ISO_POWER, "conv", "throughput", _HA, _H, 1.18, is_open=True),  # "at a tenth less cost"
    Claim(ISO_POWER, "conv", "cost", _HA, _H, 0.9, is_open=True),
    *_open(ISO_COST, "throughput", _AA, _H, 1.4),
    Claim(ISO_COST, "conv", "power", _AA, _H, 1.25),
    Claim(ISO_COST, "conv", "machines", _AA, _H, 2.0, rounding=0.5),
    *_open(ISO_THROUGHPUT, "power", _HHCAP, _H, 0.75),
    *_open(ISO_THROUGHPUT, "cost", _AA, _H, 0.75),
    # Of the abstract: "2.35 times with as much power and cost", "1.4 times at a fifth less cost"; of the conclusion:
    # "1.76 times at 15 % less power and as much cost".
    *_open(ISO_POWER, "throughput", _AA, _A, 2.35),
    *_open(ISO_COST, "throughput", _AA, _A, 2.35),
    *_open(ISO_POWER, "throughput", _AA, _H, 1.4),
    Claim(ISO_POWER, "conv", "cost", _AA, _H, 0.8, is_open=True),
    *_open(ISO_COST, "throughput", _HA, _A, 1.76),
    *_open(ISO_COST, "power", _HA, _A, 0.85),
    Claim(WRONG_WORKLOAD, "conv", "throughput", _AA, _AA, 1.0),
    Claim(WRONG_WORKLOAD, "conv", "throughput", _HH, _HH, 1.0),
    Claim(WRONG_WORKLOAD, "conv", "throughput", _HA, _HA, 0.93),
    Claim(WRONG_WORKLOAD, "conv", "throughput", _HHCAP, _HHCAP, 0.93),
)

#: Of the code workload at the rate of the iso-throughput clusters: what the paper found to be the cheapest.
CHEAPEST_HH = Cluster("Splitwise-HH", 27, 3)
#: Requests a second for a unit of cost, of the iso-cost clusters for conversations that are overloaded.
PUBLISHED_BATCH = {"Baseline-A100": 0.89, "Baseline-H100": 0.75, "Splitwise-AA": 0.89, "Splitwise-HH": 0.75}
