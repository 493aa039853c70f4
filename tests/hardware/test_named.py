"""Names of hardware as tables of measurements and people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.hardware import (
    Machine,
    machine_called,
    machine_named,
    machine_names,
    machines_called,
    read_machine,
)

# every string of the published tables' columns, and the machine that is meant
TABLES = """
AMD Instinct MI300X 192GB HBM3: mi300x
AMD Instinct MI300X-NPS1-SPX-192GB-750W: mi300x
AMD Instinct MI325X 256GB HBM3E: mi325x
AMD Instinct MI325X 256GB HBM3e: mi325x
AMD Instinct MI350X: mi350x
AMD Instinct MI355X: mi355x
AMD MI300X 192GB: mi300x
AMD MI300X-NPS1-SPX-192GB-750W: mi300x
AMD MI325X: mi325x
AMD MI355X: mi355x
AWS Inferentia2 (inf2.48xlarge): inferentia2
AWS Trainium1 (trn1.32xlarge): trainium1
AWS Trainium1 (trn1.32xlarge, 16 chips / 32 cores per node): trainium1-core
Google TPU v4: v4
Google TPU v6e (Trillium): v6e
Google TPU7x (Ironwood): v7x
Huawei Atlas 800 A3 (Ascend 910C class, 64 GB per die): ascend-910c-die
Huawei Atlas A2 (Ascend 910B class): ascend-910b
NVIDIA A100 SXM: a100-80g
NVIDIA A100 SXM 40GB: a100-40g
NVIDIA A100 SXM 80GB: a100-80g
NVIDIA A100 SXM 80GB (Jean Zay): a100-80g
NVIDIA A100 SXM 80GB (Selene): a100-80g
NVIDIA Ampere GPUs (peak 312 TFLOP/s): a100-80g
NVIDIA B200 SXM 180GB: b200
NVIDIA B200-SXM-180GB: b200
NVIDIA B300 SXM: b300
NVIDIA B300 SXM 288GB: b300
NVIDIA Blackwell GPU (B200-SXM-180GB): b200
NVIDIA Blackwell GPU (GB200): gb200
NVIDIA Blackwell Ultra GPU (B300-SXM-270GB): b300
NVIDIA Blackwell Ultra GPU (GB300): gb300
NVIDIA GB200: gb200
NVIDIA GB200 NVL72: gb200
NVIDIA GB300: gb300
NVIDIA GB300 NVL72: gb300
NVIDIA GH200 96GB (Alps Clariden): gh200-alps
NVIDIA GH200 Grace Hopper Superchip 144GB: gh200-144g
NVIDIA GH200 Grace Hopper Superchip 96GB: gh200-96g
NVIDIA H100 SXM 80GB: h100
NVIDIA H100 SXM 80GB (GCP A3): h100
NVIDIA H100 SXM 80GB (p5.48xlarge): h100
NVIDIA H100 SXM 80GB (power capped): h100
NVIDIA H100 SXM 80GB 700W (Grand Teton): h100
NVIDIA H100 SXM 96GB HBM2e 500W (Grand Teton): h100-hbm2e
NVIDIA H100-NVL-94GB: h100-nvl
NVIDIA H100-PCIe-80GB: h100-pcie
NVIDIA H100-SXM-80GB: h100
NVIDIA H100-SXM5-80GB: h100
NVIDIA H20: h20
NVIDIA H200 SXM 141GB: h200
NVIDIA H200-NVL-141GB: h200-nvl
NVIDIA H200-SXM-141GB: h200
NVIDIA H200-SXM-141GB-CTS: h200
NVIDIA H200-SXM5-141GB: h200
NVIDIA H800: h800
NVIDIA H800 SXM 80GB: h800
NVIDIA Jetson AGX Orin 64G: jetson-orin
NVIDIA L40S: l40s
NVIDIA RTX 4090: rtx4090
NVIDIA RTX PRO 6000 Blackwell: rtx-pro-6000
NVIDIA RTX PRO 6000 Blackwell Server: rtx-pro-6000
NVIDIA RTX PRO 6000 Blackwell Server Edition: rtx-pro-6000
NVIDIA V100 32GB (DGX-2): v100-32g
NVIDIA V100 32GB (Jean Zay): v100-32g
TPU v3: v3
TPU v3-256: v3
TPU v4: v4
TPU v5e: v5e
TPU v5p: v5p
TPU v6e (Trillium): v6e
TPU v7x (Ironwood): v7x
TPU-trillium: v6e
TPU-v5p: v5p
Virtualized NVIDIA H200-SXM-141GB: h200
[MAXSUN] MS-Intel Arc Pro B60 Dual 48G Turbo: arc-b60-dual
"""
PEOPLE = """
16384xH100: h100
8 x A100 80GB: a100-80g
NVIDIA A100-SXM4-40GB: a100-40g
NVIDIA A100 PCIe: a100-pcie
NVIDIA-H100-80GB-HBM3: h100
Tesla V100-SXM2-32GB: v100-32g
Intel Gaudi 3: gaudi3
AMD Instinct MI250: mi250x
L4: l4
A10G: a10g
AWS Trainium2: trainium2
Arc Pro B60: arc-b60
Ascend 910C (package): ascend-910c
Ascend 910B (376T bin): ascend-910b-376t
Tesla T4: t4
NVIDIA A10: a10
NVIDIA-A10: a10
NVIDIA A30: a30
NVIDIA A40: a40
NVIDIA L40: l40
NVIDIA RTX A6000: rtx-a6000
8xA6000: rtx-a6000
RTXA5000: rtx-a5000
NVIDIA RTX 6000 Ada Generation: rtx-6000-ada
RTX6000-Ada: rtx-6000-ada
NVIDIA GeForce RTX 5090: rtx5090
Tesla V100-SXM2-16GB: v100-16g
V100 SXM2 16 GB: v100-16g
"""


def pairs(text):
    return [line.rsplit(": ", 1) for line in text.strip().splitlines()]


@pytest.mark.parametrize(("text", "name"), pairs(TABLES) + pairs(PEOPLE))
def test_every_name_of_the_tables_is_a_machine(text, name):
    assert machine_called(text) is read_machine(name)


@pytest.mark.parametrize(
    "text",
    [
        "Huawei Ascend NPU (type not stated)",  # three bins and two generations
        "WSE-2", "M4 Max",  # neither clusters nor a matrix peak
        "Ascend 950DT",  # announced values alone
        "H1000", "H10", "", "8x", "p5.48xlarge", "NVIDIA GPU", "abacus",
    ],
)  # fmt: skip
def test_a_name_that_does_not_say_which_is_no_machine(text):
    assert machine_called(text) is None and machines_called(text) is None


def test_a_mixed_cluster_is_several_machines_and_no_single_one():
    text = "AMD Instinct MI325X 256GB HBM3E (x16), AMD Instinct MI300X 192GB HBM3 (x8)"
    found = machines_called(text)
    assert [(machine.name, count) for machine, count in found] == [("mi325x", 16), ("mi300x", 8)]
    assert machine_called(text) is None
    found = machines_called("RTX 2080 + RTX 3090 + Titan RTX")
    assert [(machine.name, count) for machine, count in found] == [
        ("rtx2080", 0), ("rtx3090", 0), ("titan-rtx", 0),
    ]  # fmt: skip
    assert machines_called("RTX 2080 + abacus") is None


@pytest.mark.parametrize("name", machine_names())
def test_every_file_is_called_by_its_own_name_and_its_title_names_the_same_chip(name):
    assert machine_called(name) is read_machine(name) is machine_called(f"8x{name.upper()}")
    by_title = machine_called(read_machine(name).title)
    assert by_title is None or by_title.generation == read_machine(name).generation


@given(text=st.text() | st.text("hHaA0123 xX+,()-."))
def test_any_text_is_a_machine_or_none(text):
    assert isinstance(machine_called(text), Machine | None)
    machines_called(text)


@pytest.mark.parametrize(
    "text", ["T4 32GB", "H100 64GB", "RTX 2080 Ti", "A100 SXM 20 GB", "RTX 4090 D", "RTX 6000"]
)
def test_a_device_with_other_memory_or_another_chip_is_not_the_one_of_that_number(text):
    assert machine_called(text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A10G", "a10g"), ("NVIDIA GH200 480GB", "gh200-96g"), ("TPU v5 lite", "v5e"),
        ("TPU v5litepod-256", "v5e"), ("trn2u.48xlarge", "trainium2"),
        ("Trainium (trn1.2xlarge)", "trainium1"), ("trn1.32xlarge (32 cores)", "trainium1-core"),
    ],
)  # fmt: skip
def test_names_as_drivers_and_clouds_give_them(text, name):
    assert machine_called(text).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a6000", "rtx-a6000"), ("RTX-A6000", "rtx-a6000"), ("rtx_a5000", "rtx-a5000"),
        ("RTX 5090", "rtx5090"), ("rtx-4090", "rtx4090"), ("GeForce RTX 3090", "rtx3090"),
        ("Tesla T4", "t4"), ("NVIDIA L40", "l40"), ("A100-80GB", "a100-80g"), ("a100", "a100-80g"),
        ("H100-80GB", "h100"), ("V100-16GB", "v100-16g"), ("Gaudi 3", "gaudi3"),
        ("AMD Instinct MI300X", "mi300x"), ("6000 Ada", "rtx-6000-ada"),
    ],
)  # fmt: skip
def test_a_whole_name_is_a_machine_however_it_is_written(text, name):
    assert machine_named(text) is read_machine(name)


@pytest.mark.parametrize(
    "text", ["h100-pci", "my h100", "H100-64GB", "V100-24GB", "rtx6000", "nvidia", "", "-", "80GB"]
)
def test_a_name_with_another_word_or_another_memory_is_none(text):
    assert machine_named(text) is None


@given(text=st.text() | st.text("aA10tT4rx- 68GB"))
def test_any_text_is_a_whole_name_or_none(text):
    assert isinstance(machine_named(text), Machine | None)
