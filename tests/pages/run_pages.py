"""Pages of runs that never happened, with numbers that can be found again."""

from __future__ import annotations

from html.parser import HTMLParser

from phalanx.pages import Curves, MemoryStack, RunPage, Timeline
from phalanx.report import Report
from phalanx.trace import Trace, TraceBuilder

VOID = {"meta", "link", "br", "img", "hr", "input", "col"}
LONG_NOTE = "FSDP over 2; rows of 1,024 tokens; formula / 0.52, of 15 published rows"
PARTS = ("embedding", "linear", "attention", "norm", "head", "optimizer")


def report() -> Report:
    """Predicted and measured rows: one gate met, one missed, one without."""
    made = Report("job on this machine")
    made.add("training/step time", 0.848284, "s", "formula", note="measured rates")
    made.add("training/step time", 0.876831, "s", "measured", target=0.848284, tolerance_frac=0.15)
    made.add("training/peak memory", 208127232.0, "bytes", "formula")
    made.add(
        "training/peak memory", 130002432.0, "bytes", "measured", target=208127232.0,
        tolerance_frac=0.15,
    )  # fmt: skip
    made.add("training/held-out loss before", 7.62952, "nats/token", "measured")
    made.add(
        "training/held-out loss after", 6.87434, "nats/token", "measured", target=7.62952,
        bound="below",
    )  # fmt: skip
    made.add("load/TTFT median", 0.0251, "s", "simulated")
    made.add("load/TTFT median", 0.0283, "s", "measured")
    made.add("time/train", 4.50962, "s", "measured", note="rank 0")
    made.add("time/export", 0.133187, "s", "measured")
    made.add("time/whole run", 34.5418, "s", "measured")
    return made


def parity(value: float | None = 0.0) -> Report:
    """One form compared, or the reason why not."""
    made = Report("20 prompts x 32 tokens")
    note = "fp32" if value is not None else "vLLM is not installed"
    gate = {} if value is None else {"target": 0.0}
    made.add("parity/merged/tokens that differ", value, "1", "measured", note=note, **gate)
    return made


def elsewhere() -> Report:
    """Prices of two machines, one of them published."""
    made = Report("This job with Gemma 4 31B")
    made.add("elsewhere/2xh100/hours", 3.42, "h", "formula", note=LONG_NOTE)
    made.add("elsewhere/2xh100/cost", 20.52, "USD", "formula", note="fits")
    made.add("elsewhere/4xv5p/hours", 2.31, "h", "formula")
    made.add("published recipe/2xh100 over 4xv5p/time", 1.48, "1", "formula")
    made.add("published recipe/2xh100 over 4xv5p/time", 1.61, "1", "published", note="Table 2")
    made.notes["contradiction, steps"] = "1,250 in the text, 625 in the script"
    return made


def step(
    source: str, num_ranks: int, *, operators: bool = True, start_s: float = 0.0, number: int = 1
) -> Trace:
    """A step of two passes of one micro-batch and an update, with a collective in each pass."""
    builder = TraceBuilder(source, "job")
    for rank in range(num_ranks):
        begin_s = start_s + rank * 10.0 * (source == "measured")  # clocks of other origins
        about = {"role": "train", "rank": rank, "step": number}
        builder.add(
            **about, action_id="step1", operator="step", lane="step", start_s=begin_s, dur_s=0.7
        )
        for at, (phase, name) in enumerate((("F", "forward"), ("B", "backward"))):
            span_s = begin_s + 0.3 * at
            builder.add(
                **about, action_id=f"{phase}0", phase=phase, item=0, operator=name, lane="compute",
                start_s=span_s, dur_s=0.3,
            )  # fmt: skip
            lane = "operators" if source == "simulated" else "thread7"
            prefix = "" if source == "simulated" else "aten::"
            for index in range(40 if operators else 0):
                builder.add(
                    **about, operator=prefix + PARTS[index % 5], layer="model.layers.0",
                    phase=phase, lane=lane, start_s=span_s + 0.006 * index, dur_s=0.005,
                )  # fmt: skip
            builder.add(
                **about, operator="all_gather", lane="axis:shard", axis="shard",
                start_s=span_s + 0.24, dur_s=0.06, payload_bytes=8.0,
            )  # fmt: skip
        builder.add(
            **about, action_id="O", phase="O", operator="optimizer", lane="compute",
            start_s=begin_s + 0.6, dur_s=0.1,
        )  # fmt: skip
    return builder.build()


def page(**changes: object) -> RunPage:
    """A page with all its parts."""
    parts: dict = {
        "title": "job",
        "report": report(),
        "facts": ["tiny, pretrain, float32", "6 steps", "30 November 2026"],
        "parity": parity(),
        "elsewhere": elsewhere(),
        "curves": Curves(
            steps=[1, 2, 3],
            losses=[7.641, 7.3, 7.078],
            tokens_per_s=[4678.0, 5000.0, 5100.0],
            held_out=[[0, 7.62952], [3, 6.87434]],
            predicted_tokens_per_s=4900.0,
        ),
        "memory": MemoryStack(
            terms={"weights": 3e6, "activations": 2e7, "runtime": 5e7},
            measured_bytes=8.5e7,
            limit_bytes=1.2e8,
        ),
        "timeline": Timeline(simulated=step("simulated", 2), measured=step("measured", 2)),
        "serving": "up to 8 requests at once, 256 tokens each",
        "samples": [{"prompt": "What is it?", "before": "row row row", "after": "A class."}],
        "commands": [("vLLM", "vllm serve runs/job/export")],
        "not_run": ["Nothing ran on a GPU."],
        "environment": {"python": "3.11", "torch": "2.13"},
    }
    return RunPage(**parts | changes)


class Elements(HTMLParser):
    """What a page is made of; fails on an element that is not closed, or closed too early.

    Attributes:
        texts: text by the element around it; all: every text.
        ids, addresses: values of id, and of src and href.
        names: elements that occur.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.names: set[str] = set()
        self.titles: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self._seen(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._seen(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def _seen(self, tag, attrs):
        self.names.add(tag)
        table = dict(attrs)
        assert len(table) == len(attrs), f"an attribute twice in <{tag}>"
        assert not any(name.startswith("on") for name in table), f"script in <{tag}>"
        self.ids += [table["id"]] if "id" in table else []
        self.titles += [table["title"]] if "title" in table else []
        names = ("src", "href", "xlink:href")
        self.addresses += [table[name] for name in names if name in table]

    @property
    def all(self) -> str:
        """Every visible text."""
        return " ".join(" ".join(text for tag, text in self.texts if tag != "style").split())
