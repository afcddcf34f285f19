"""The figures of a run: what they are, where they appear, and that nothing else of a script's logs changes."""

import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from slideformer_backend import SlideFormerPlugin, api
from slideformer_backend.engine.report import EngineReport
from slideformer_backend.integrations.session import session
from slideformer_backend.metrics import Meter, Operations, bottleneck, peak_of
from slideformer_backend.transfer.timer import StreamTimer
from tests.launch.conftest import clean, fresh_state  # noqa: F401  # fixtures

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "use_cache": False,
}
NAMES = {
    "tokens_per_second",
    "busy_h2d",
    "busy_d2h",
    "busy_out",
    "busy_back",
    "busy_file_out",
    "busy_file_back",
    "busy_load",
    "busy_store",
    "busy_weights_in",
    "busy_weights_out",
    "busy_norms",
    "busy_update",
    "stalled_compute",
    "repairs",
    "skipped_steps",
    "memory_gpu_peak_gb",
    "memory_host_gb",
    "memory_pinned_gb",
    "memory_process_gb",
}


@pytest.fixture(autouse=True)
def detached():
    """No engine outlives its test."""
    yield
    for engine in api.engines():
        engine.detach()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def report(**values):
    sizes = {"parameters": 1, "units": 1, "gpu_peak_bytes": 3 * 10**9, "slot_bytes": 0, "host_bytes": 5 * 10**9}
    return EngineReport(**{**sizes, "pinned_bytes": 2 * 10**9, "repairs": 4, "skipped": 1, **values})


class TestMeter:
    @pytest.fixture
    def clock(self):
        return Clock()

    def test_figures_are_since_the_last_reading(self, clock):
        meter = Meter(Operations(600.0, 10.0), 1e6, clock)
        seen = report(busy={"update": 0.0}, stalls={})
        meter.follow(lambda: seen)
        clock.now, seen = 2.0, report(busy={"update": 1.0}, stalls={"compute after weights loaded": 0.5})
        meter.tokens(torch.tensor(100), 20)
        meter.tokens(100, 20)
        figures = meter.read()
        assert figures == {
            "slideformer/tokens_per_second": 100.0,
            "slideformer/mfu": pytest.approx(200 * (600 + 10 * 20) / 2 / 1e6),
            "slideformer/busy_update": 0.5,
            "slideformer/stalled_compute": 0.25,
            "slideformer/repairs": 4,
            "slideformer/skipped_steps": 1,
            "slideformer/memory_gpu_peak_gb": 3.0,
            "slideformer/memory_host_gb": 5.0,
            "slideformer/memory_pinned_gb": 2.0,
            "slideformer/memory_process_gb": figures["slideformer/memory_process_gb"],
        }
        clock.now = 3.0
        again = meter.read()
        assert again["slideformer/tokens_per_second"] == again["slideformer/busy_update"] == 0.0

    def test_nothing_is_read_of_an_engine_that_is_gone(self, clock):
        meter = Meter(None, None, clock)
        assert meter.read() == {}
        meter.follow(lambda: None)
        assert meter.read() == {}
        assert meter.advice() is None

    def test_the_bottleneck_is_named_once_and_after_enough_steps(self, clock):
        meter = Meter(None, None, clock)
        seconds = 0.0
        meter.follow(lambda: report(stalls={"h2d after weights updated": seconds, "compute after norm": 0.1}))
        said = []
        for step in range(40):
            clock.now, seconds = 4.0 * step, 100.0 if step < 2 else 100.0 + 1.6 * (step - 1)
            meter.step()
            said.append(meter.advice())
        found = [text for text in said if text]
        assert len(found) == 1
        assert "stands still 40% of the time because of the optimizer on the CPU" in found[0]
        assert "gradient_accumulation_steps" in found[0]
        assert said.index(found[0]) >= 15

    def test_every_wait_of_compute_has_a_cause(self):
        waits = {
            "compute after weights loaded": "copying weights",
            "compute after weights refreshed": "the optimizer",
            "host waits for update": "the optimizer",
            "host waits for norm": "the norm",
            "host waits for gradient": "copying gradients",
            "compute after gradient slot drained": "copying gradients",
            "compute after pending gradient": "copying gradients",
            "compute after boundary loaded": "bringing activations back",
            "compute after weights pulled": "copying weights",
            "compute after update on the device": "updates of cores",
            "compute after sum of gradients fetched": "sums of gradients",
            "compute after stage of gradient sums drained": "sums of gradients",
        }
        for wait, cause in waits.items():
            assert f"because of {cause}" in bottleneck({wait: 0.5})
        assert bottleneck({"host waits for update": 0.1}) is None
        assert bottleneck({}) is None


class TestOperations:
    def test_of_a_llama(self):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
        matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
        assert Operations.of(model) == (6 * matrices, 12 * 2 * 32)
        model.model.layers[0].requires_grad_(False)
        frozen = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
        assert Operations.of(model).per_token == 6 * matrices - 2 * frozen

    def test_tied_heads_count_once_and_experts_by_their_share(self):
        tied = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
        assert Operations.of(tied) == Operations.of(LlamaForCausalLM(LlamaConfig(**SMALL)))
        model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
        experts = sum(p.numel() for n, p in model.named_parameters() if ".experts" in n)
        rest = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
        rest -= sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and ".experts" in n)
        assert Operations.of(model).per_token == 6 * (rest + experts / 2)

    def test_any_module_has_some(self):
        assert Operations.of(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())) == (90, 0)

    def test_no_configuration_ends_a_run(self):
        """Swin has lists, Gemma 4 raises, and whatever else there is: a figure or none."""
        for kind, configuration in CONFIG_MAPPING.items():
            module = torch.nn.Linear(3, 5)
            try:
                module.config = configuration()
            except Exception:  # has no defaults, or needs a hub
                continue
            operations = Operations.of(module)
            assert operations is None or operations.per_token == 90, kind
        gemma = Gemma4TextConfig(**SMALL, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8)
        assert Operations.of(AutoModelForCausalLM.from_config(gemma)) is None

    def test_there_is_none_where_the_configuration_does_not_say(self):
        known = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
        expected = Operations.of(known)
        assert expected is not None
        said = known.config.to_dict()
        known.config = SimpleNamespace(**{**said, "num_experts_per_tok": [2, 2]})  # as HunYuan-MoE has it
        assert Operations.of(known) == expected
        for wrong in ([1, 2], None, "two"):
            known.config = SimpleNamespace(**{**said, "num_experts_per_tok": wrong})
            assert Operations.of(known) is None
        meter = Meter(Operations.of(known), 1e12)
        meter.follow(report)
        meter.tokens(100, 20)
        assert meter.mfu() is None
        assert "slideformer/mfu" not in meter.read()

    def test_the_peak_is_known_for_known_devices(self, monkeypatch):
        assert peak_of(torch.device("cpu")) is None
        names = {"NVIDIA H200": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA GeForce RTX 4090": 165e12, "Tesla T4": None}
        for name, peak in names.items():
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
            assert peak_of(torch.device("cuda", 0)) == peak


class Event:
    def __init__(self, at, is_over=True):
        self.at, self.is_over = at, is_over

    def query(self):
        return self.is_over

    def elapsed_time(self, other):
        return other.at - self.at


def test_streams_are_timed_without_waiting():
    timer, late = StreamTimer(), Event(5000.0, is_over=False)
    timer.add("h2d", Event(1000.0), Event(1500.0))
    timer.add("h2d", Event(2000.0), Event(2250.0))
    timer.add("h2d", Event(3000.0), late)
    assert timer.seconds() == {"h2d": 0.75}
    late.is_over = True
    assert timer.seconds() == {"h2d": 2.75}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_are_timed_on_a_gpu():
    timer, stream = StreamTimer(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        begun = timer.mark(stream)
        torch.cuda._sleep(200_000_000)
        timer.add("work", begun, timer.mark(stream))
    assert timer.seconds() == {}
    stream.synchronize()
    assert 0.01 < timer.seconds()["work"] < 10.0


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self):
        super().__init__()
        self.logged = []

    @property
    def tracker(self):
        return self.logged

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, dict(values)))


def script(managed):
    session.reset()
    tracker = Memory()
    handlers = [SlideFormerPlugin(status="off")] if managed else None
    accelerator = Accelerator(cpu=True, log_with=tracker, kwargs_handlers=handlers)
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    ids = torch.arange(8)[None]
    for step in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    return tracker.logged


def without_ours(values):
    return {name: value for name, value in values.items() if not name.startswith("slideformer/")}


def ours(values):
    return {name.removeprefix("slideformer/") for name in values if name.startswith("slideformer/")}


def test_trackers_get_the_figures_and_else_what_they_got(clean):  # noqa: F811
    plain, managed = script(False), script(True)
    assert [(step, without_ours(values)) for step, values in managed] == plain
    for _, values in managed:
        assert ours(values) == NAMES
        assert values["slideformer/tokens_per_second"] > 0
    assert managed[-1][1]["slideformer/memory_host_gb"] > 0


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        row = (torch.arange(8) + index) % 64
        return {"input_ids": row, "labels": row}


def test_trainer_logs_the_figures_and_else_what_it_logged(clean, tmp_path, fresh_state):  # noqa: F811
    from accelerate.state import AcceleratorState, GradientState

    histories = []
    for managed in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        clean.setenv("ACCELERATE_USE_SLIDEFORMER", "true" if managed else "false")
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            max_steps=4,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
            optim="adamw_torch_fused",
        )
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        histories.append(trainer.state.log_history)
    plain, managed = histories
    assert [sorted(without_ours(entry)) for entry in managed] == [sorted(entry) for entry in plain]
    for one, two in zip(plain, managed, strict=True):
        assert one.get("loss") == two.get("loss")
        assert one.get("eval_loss", 0.0) == pytest.approx(two.get("eval_loss", 0.0), rel=1e-5)
        assert ours(two) == (NAMES if "loss" in two else set())
    assert managed[0]["slideformer/tokens_per_second"] > 0


def test_the_warning_reaches_the_log(clean, caplog, monkeypatch):  # noqa: F811
    monkeypatch.setattr("slideformer_backend.metrics.Meter.advice", lambda self: "SlideFormer: compute stands still")
    with caplog.at_level(logging.WARNING):
        script(True)
    assert "compute stands still" in caplog.text
