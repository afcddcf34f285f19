"""On a GPU: nothing moves a model there whole before it is known what it is for."""

import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.fixture
def on_gpu(active):
    """Bytes of tensors on the GPU beyond what there was."""
    active.setenv("SLIDEFORMER_STATUS", "off")
    before = torch.cuda.memory_allocated()
    return lambda: torch.cuda.memory_allocated() - before


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 64
        return {"input_ids": ids, "labels": ids}


def test_moves_and_device_maps_wait(on_gpu, model, tmp_path):
    from transformers import AutoModelForCausalLM

    model.to("cuda")
    model.cuda()
    model.save_pretrained(tmp_path)
    for device_map in ("auto", "cuda", 0):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert on_gpu() < 1e6


def test_a_teacher_follows_its_inputs(on_gpu, model):
    ids = torch.ones(1, 4, dtype=torch.long)
    expected = model(input_ids=ids).logits
    logits = model.to("cuda")(input_ids=ids.to(model.device)).logits
    assert logits.device.type == "cuda"
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_trainer_never_moves_the_model_and_trains_on_the_gpu(on_gpu, model, tmp_path):
    from transformers import Trainer, TrainingArguments

    from slideformer_backend import api

    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, bf16=True
    )
    assert arguments.n_gpu == 1
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    assert on_gpu() < 1e6
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    (engine,) = api.engines()
    assert engine.device.type == "cuda"
    engine.detach()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_the_launcher_starts_one_process_on_one_gpu(python, tmp_path):
    (tmp_path / "s.py").write_text(
        "import json, os, torch\nfrom accelerate import Accelerator\na = Accelerator()\n"
        "print('RESULT' + json.dumps([type(a).__name__, str(a.device), torch.cuda.device_count(), a.num_processes]))\n"
    )
    output = python("-m", "accelerate.commands.launch", "--use_slideformer", "s.py")
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT")]
    name, device, visible, processes = json.loads(line[len("RESULT") :])
    assert (name, visible, processes) == ("SlideFormerAccelerator", 1, 1)
    assert device.startswith("cuda")
