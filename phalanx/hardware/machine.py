"""One kind of device: its numbers, each with the source that it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.errors import JobError


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a machine, in SI units, and where it comes from."""

    value: float
    kind: str  # measured, published, assumption
    source: str
    date: str


# name in the file -> dimension ("": a share of 1). No cost model has to guess what is required.
REQUIRED = {
    "matmul": "flops_per_s",
    "memory": "bytes",
    "usable_memory_frac": "",
    "memory_bandwidth": "bytes_per_s",
    "link_bandwidth": "bytes_per_s",
    "network_bandwidth": "bytes_per_s",
    "link_latency": "s",
    "network_latency": "s",
    "launch_overhead": "s",
}
OPTIONAL = {
    "bf16_peak": "flops_per_s",
    "fp8_peak": "flops_per_s",
    "fp4_peak": "flops_per_s",
    "int8_peak": "flops_per_s",
    "fp8_matmul": "flops_per_s",
    "fp4_matmul": "flops_per_s",
    "tdp": "w",
    "host_memory": "bytes",
    "price": "usd_per_h",
    "second_price": "usd_per_h",
    "spot_price": "usd_per_h",
}
TEXTS = (
    *("vendor", "generation", "topology", "half_precision"),
    *("price_terms", "second_price_terms"),
)
PRICE_TERMS = ("on demand", "reserved", "spot", "estimate")
PRECISIONS = ("bf16", "fp16", "fp8", "fp4", "int8")
HALVES = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of device. A figure that is None is not known, and nothing is derived from it.

    Attributes:
        name: of the file.
        title: as its maker calls it.
        vendor, generation: maker and family ("NVIDIA", "Hopper"); devices of one generation run the
            same software.
        topology: of the fast links, in words.
        half_precision: "fp16" where a device multiplies 16 bits in fp16 alone; "": in bf16 too.
        devices_per_domain: devices that share the fast links.
        host_devices: of one host, where a cloud's name said so; 0: `devices_per_host` assumes it.
        cores_per_device: what names of slices such as "v5p-8" count; 0: there are no such names.
        matmul: sustained dense matrix products in bf16, FLOP/s (not the data sheet's peak; fp16
            where a device has no bf16).
        memory, memory_bandwidth: of one device, bytes and bytes/s.
        usable_memory_frac: share of `memory` that tensors may fill.
        link_bandwidth, link_latency: inside a domain, per device and direction.
        network_bandwidth, network_latency: between domains, per device and direction.
        launch_overhead: seconds of host work per operator that compute does not hide.
        bf16_peak, fp8_peak, fp4_peak, int8_peak: data sheet, dense, FLOP/s (operations/s).
        fp8_matmul, fp4_matmul: sustained, as `matmul`.
        tdp: watts of one device at full load.
        host_memory: bytes of the host's memory, per device.
        price, second_price, spot_price: USD per device and hour, by the provider that its source
            names.
        price_terms, second_price_terms: one of `PRICE_TERMS` ("estimate": of nobody who rents).
    """

    name: str
    title: str
    devices_per_domain: int
    matmul: Figure
    memory: Figure
    memory_bandwidth: Figure
    link_bandwidth: Figure
    network_bandwidth: Figure
    link_latency: Figure
    network_latency: Figure
    launch_overhead: Figure
    usable_memory_frac: Figure
    vendor: str = ""
    generation: str = ""
    topology: str = ""
    half_precision: str = ""
    price_terms: str = ""
    second_price_terms: str = ""
    cores_per_device: int = 0
    host_devices: int = 0
    bf16_peak: Figure | None = None
    fp8_peak: Figure | None = None
    fp4_peak: Figure | None = None
    int8_peak: Figure | None = None
    fp8_matmul: Figure | None = None
    fp4_matmul: Figure | None = None
    tdp: Figure | None = None
    host_memory: Figure | None = None
    price: Figure | None = None
    second_price: Figure | None = None
    spot_price: Figure | None = None

    @property
    def devices_per_host(self) -> int:
        """Devices of one host: its domain of fast links, 4 where a domain is a rack or a torus, 8
        behind PCIe alone (what providers rent out; assumptions); `host_devices`, if known."""
        if self.host_devices:
            return self.host_devices
        if self.devices_per_domain == 1:
            return 8
        return self.devices_per_domain if self.devices_per_domain <= 16 else 4

    @property
    def half(self) -> str:
        """Format of its 16-bit products: "bf16", or "fp16" of devices without units for bf16
        (before Ampere). What these are given in bf16 runs many times slower than `matmul`."""
        return self.half_precision or "bf16"

    @property
    def has_bf16(self) -> bool:
        """Whether it has units for bf16."""
        return self.half == "bf16"

    @property
    def usable_bytes(self) -> float:
        """Memory of a device that tensors may fill."""
        return self.memory.value * self.usable_memory_frac.value

    @property
    def usd_per_h(self) -> float:
        """Of one device by `price`; infinite where no price is known, so that it sorts last."""
        return self.price.value if self.price else math.inf

    def matmul_of(self, precision: str) -> Figure:
        """Sustained dense products of a precision.

        Measured where the file has it; else the peak of that precision times the share that bf16
        products reach of theirs. A device without units for a precision computes in bf16, whatever
        the weights are kept in.

        Raises:
            JobError: `job/bad-value` for a precision that is none of `PRECISIONS`.
        """
        if precision not in PRECISIONS:
            raise JobError(
                "job/bad-value", "precision", precision, "no such precision", legal=PRECISIONS
            )
        if precision in ("bf16", "fp16"):
            return self.matmul
        sustained: Figure | None = getattr(self, f"{precision}_matmul", None)
        if sustained:
            return sustained
        peak: Figure | None = getattr(self, f"{precision}_peak")
        if peak is None:
            source = f"no {precision} products: as in bf16 ({self.matmul.source})"
            return Figure(self.matmul.value, self.matmul.kind, source, self.matmul.date)
        frac = self.matmul.value / self.bf16_peak.value if self.bf16_peak else 1.0
        source = f"{frac:.3f} of the peak, as bf16 products reach of theirs; {peak.source}"
        return Figure(frac * peak.value, "assumption", source, peak.date)

    def matmul_flops_per_s(self, precision: str = "bf16") -> float:
        """The value of `matmul_of`."""
        return self.matmul_of(precision).value

    def figures(self) -> dict[str, Figure]:
        """All numbers that are known, by name."""
        known = {name: getattr(self, name) for name in REQUIRED | OPTIONAL}
        return {name: figure for name, figure in known.items() if figure}
