"""What a run on this machine would take elsewhere, and a published comparison beside the formula.

The published one is LoRA of Gemma 4 31B on 4 TPU v5p chips and on 2 H100 (arXiv 2605.25645). The
formula is that of `phalanx plan`, with nothing fitted to these rows; where it is far off, the
report says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.cost.model_shape import shape_of
from phalanx.cost.training_plans import RECOMPUTE, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.data.store import Prepared
from phalanx.hardware import parse_cluster
from phalanx.job import Job
from phalanx.models.named import named_model
from phalanx.models.spec import PROJECTIONS, LoraSpec
from phalanx.planner.answers import Answer
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.profile import DataProfile, profile_of_prepared
from phalanx.planner.search import answer
from phalanx.planner.training import Training
from phalanx.report import Report

MODEL = "gemma-4-31b"
_SOURCE = "arXiv 2605.25645"


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One column of the published comparison.

    Attributes:
        cluster: shorthand.
        tensor, shard, recompute: as the run was laid out; what is sharded is FSDP.
        software: whose efficiency is assumed.
        sample_tokens: computed for each sample, padding included.
        hours, usd_per_h, dollars: as published; the rate is of all devices.
        serve_usd_per_h: of the devices that served the result.
        assumed: what the publication does not say.
    """

    cluster: str
    tensor: int
    shard: int
    recompute: str
    software: str
    sample_tokens: int
    hours: float
    usd_per_h: float
    dollars: float
    serve_usd_per_h: float
    assumed: str


STEPS, SAMPLES, MEAN_TOKENS, PADDED_TOKENS, LORA_RANK = 1244, 8, 922, 3072, 64
TPU = PublishedRun(
    cluster="4xv5p",
    tensor=4,
    shard=1,
    recompute="full",
    software="maxtext",
    sample_tokens=PADDED_TOKENS,
    hours=3.34,
    usd_per_h=16.80,
    dollars=56.11,
    serve_usd_per_h=21.52,
    assumed="every sample padded to 3,072 tokens, as its script does; the text says 4,096",
)
GPU = PublishedRun(
    cluster="2xh100",
    tensor=1,
    shard=2,
    recompute="full",
    software="torch",
    sample_tokens=PADDED_TOKENS,
    hours=5.39,
    usd_per_h=22.12,
    dollars=119.23,
    serve_usd_per_h=22.12,
    assumed="its recipe is not public: padded as on the TPUs, since the text calls them identical; "
    "FSDP over 2, one sample at a time, recomputation",
)
CONTRADICTIONS = {
    "steps on the GPUs": "1,250 in the text, 625 in the plotting script (a batch of 16, not 8)",
    "loss": "full sequence on the GPUs by the text, assistant only by a comment in the code",
    "1.82 times cheaper": "holds for one hour of serving; for a day it is 1.14",
    "speed of the runs": "25 % of the peak on the TPUs with padding, 4.5 % on the GPUs on real "
    "tokens: far below other published LoRA runs, so the formula is faster than both",
}


def elsewhere(job: Job, data: Prepared) -> Report:
    """This job's data and steps with Gemma 4 31B elsewhere, and the published recipe.

    Args:
        job: as it runs here; its method, rank, batch and steps are kept.
        data: its samples, counted by its own tokenizer.
    """
    report = Report(f"{MODEL} elsewhere")
    counted_by = f"the tokenizer of {job.model.name}"
    profile = profile_of_prepared(data, job.data.source, counted_by, is_assumption=True)
    training = _training(job, profile)
    for run in (GPU, TPU):
        cluster = parse_cluster(run.cluster)
        _add_answer(report, answer(training, AskedCluster(run.cluster, cluster)))
    seconds = {run.cluster: published_step_s(run) for run in (GPU, TPU)}
    for run in (GPU, TPU):
        _add_published(report, run, seconds[run.cluster])
    unpadded_h = published_step_s(replace(GPU, sample_tokens=MEAN_TOKENS)) * STEPS / 3600
    quantity = f"published recipe/{GPU.cluster}, unpadded/hours"
    report.add(quantity, unpadded_h, "h", "formula", note="had it not padded its samples")
    _add_ratios(report, seconds[GPU.cluster] / seconds[TPU.cluster])
    report.notes |= {
        "data": f"{profile.source}, {training.num_steps} steps of {training.batch_tokens} tokens, "
        f"counted by {profile.counted_by}",
    }
    report.notes |= {f"contradiction, {name}": text for name, text in CONTRADICTIONS.items()}
    return report


def _training(job: Job, profile: DataProfile) -> Training:
    config = named_model(MODEL).config
    lora = None
    if job.train.method == "lora":
        lora = LoraSpec(rank=job.train.lora_rank, alpha=job.train.lora_alpha, targets=PROJECTIONS)
    return Training(
        config=config,
        profile=profile,
        method=job.train.method,
        lora=lora,
        batch_tokens=job.train.global_batch_tokens,
        epochs=job.train.epochs,
        steps=job.train.steps,
        master_dtype=job.train.master_dtype,
        seed=job.train.seed,
    )


def _add_answer(report: Report, found: Answer) -> None:
    """Rows of one cluster; without a plan that fits, the memory that is missing."""
    where = f"elsewhere/{found.asked.text}"
    sized = found.best.sized if found.best else found.smallest
    plan = sized.describe() if sized else "no legal plan"
    if found.best is not None:
        bars = "{1:.3g} to {2:.3g}"
        note = f"{plan}; bars {bars.format(*found.hours)} h; {found.source}"
        report.add(f"{where}/hours", found.hours[0], "h", "formula", note=note)
        if price := found.asked.cluster.machine.price:
            note = f"bars {bars.format(*found.dollars)} USD; {price.source}"
            report.add(f"{where}/cost", found.dollars[0], "USD", "formula", note=note)
    if sized is not None:
        share = sized.peak_bytes / found.limit_bytes
        note = "fits" if found.fits else f"does not fit: {sized.largest_term} is the most"
        report.add(
            f"{where}/peak memory of a rank", sized.peak_bytes, "bytes", "formula", note=note
        )
        report.add(f"{where}/share of usable memory", share, "1", "formula")


def published_step_s(run: PublishedRun) -> float:
    """Seconds of a step of the published recipe, as the planner prices it."""
    plans = TrainingPlans(
        tensor=run.tensor,
        data=run.shard,
        shard=run.shard,
        zero=3 if run.shard > 1 else 0,
        row_tokens=run.sample_tokens,
        num_micro=SAMPLES // run.shard,
        recompute=RECOMPUTE.index(run.recompute),
        method="lora",
        lora_rank=LORA_RANK,
        software=run.software,
    )
    machine = parse_cluster(run.cluster).machine
    return float(training_step(shape_of(named_model(MODEL).config), plans, machine).total_s[0])


def _add_published(report: Report, run: PublishedRun, step_s: float) -> None:
    """Hours and dollars of one column, formula beside published."""
    where, hours = f"published recipe/{run.cluster}", step_s * STEPS / 3600
    note = f"{STEPS:,} steps of {SAMPLES} samples, mean {MEAN_TOKENS} tokens; {run.assumed}"
    report.add(f"{where}/hours", hours, "h", "formula", note=note)
    report.add(f"{where}/hours", run.hours, "h", "published", note=_SOURCE)
    note = f"at the published {run.usd_per_h} USD an hour"
    report.add(f"{where}/cost", hours * run.usd_per_h, "USD", "formula", note=note)
    report.add(f"{where}/cost", run.dollars, "USD", "published", note=_SOURCE)


def _add_ratios(report: Report, formula_ratio: float) -> None:
    """How much faster and cheaper the TPU run was."""
    rates = GPU.usd_per_h / TPU.usd_per_h
    with_serving = (GPU.dollars + GPU.serve_usd_per_h) / (TPU.dollars + TPU.serve_usd_per_h)
    rows = (
        ("training time", formula_ratio, 1.61),
        ("training cost", formula_ratio * rates, 2.12),
    )
    for name, formula, published in rows:
        quantity = f"published recipe/2xh100 over 4xv5p/{name}"
        report.add(quantity, formula, "1", "formula")
        report.add(quantity, published, "1", "published", note=_SOURCE)
    quantity = "published recipe/2xh100 over 4xv5p/cost with one hour of serving"
    note = "sum of the published dollars and one hour at the serving rates"
    report.add(quantity, with_serving, "1", "formula", note=note)
    report.add(quantity, 1.82, "1", "published", note=_SOURCE)
