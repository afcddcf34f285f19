"""``slideformer export``: the files that the model's own ``save_pretrained`` makes, bit for bit."""

import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from slideformer_backend import SlideFormerPlugin
from slideformer_backend.cli import main
from slideformer_backend.integrations.session import session

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "use_cache": False,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
}


def trained(model, dtype=torch.float32):
    session.reset()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[SlideFormerPlugin(status="off")])
    model = model.to(dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(parameters, lr=1e-2))
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer


def tensors_of(folder):
    """All tensors by name; the index says which file has which."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = load_file(path)
        assert {name for name, file in index.items() if file == path.name} == set(content)
        found |= content
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", ["save_state", "trainer"])
def test_export_is_what_save_pretrained_makes(clean, tmp_path, kind, dtype, source):
    torch.manual_seed(0)
    accelerator, model, _ = trained(MODELS[kind](), dtype)
    model.save_pretrained(tmp_path / "expected", max_shard_size="12KB")
    if source == "save_state":
        accelerator.save_state(str(tmp_path / "state"))
    else:  # as Trainer's checkpoints have it
        model.save_pretrained(tmp_path / "state")
    (tmp_path / "state" / "tokenizer.json").write_text("{}")
    main(["export", str(tmp_path / "state"), str(tmp_path / "out"), "--max_shard_size", "12KB"])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    expected, exported = tensors_of(tmp_path / "expected"), tensors_of(tmp_path / "out")
    assert expected.keys() == exported.keys()  # transformers cuts a model that it has loaded elsewhere than a new one
    for name, tensor in expected.items():
        assert tensor.dtype == exported[name].dtype
        assert torch.equal(tensor, exported[name])
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("expected", "out")]
    assert configs[0] == configs[1]
    assert sorted(p.name for p in (tmp_path / "out").glob("*.json") if "index" not in p.name) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    ids = torch.arange(8)[None]
    if dtype == torch.float32:  # model.to(bfloat16) has rounded buffers that loading computes anew
        with torch.no_grad():
            assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_float32_takes_the_masters(clean, tmp_path):
    accelerator, _, optimizer = trained(MODELS["tied"](), torch.bfloat16)
    accelerator.save_state(str(tmp_path / "state"))
    state = optimizer.state_dict()["state"]
    main(["export", str(tmp_path / "state"), str(tmp_path / "out"), "--dtype", "float32"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for number, (_, parameter) in enumerate(loaded.named_parameters()):
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, state[number]["master"])
        assert not torch.equal(parameter, parameter.bfloat16().float())


@pytest.mark.parametrize("source", ["save_state", "trainer"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers
def test_adapters(clean, tmp_path, source):
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    base = MODELS["llama"]()
    base.save_pretrained(tmp_path / "base")
    accelerator, model, _ = trained(get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))
    if source == "save_state":
        accelerator.save_state(str(tmp_path / "state"))
    else:
        model.save_pretrained(tmp_path / "state")
    main(["export", str(tmp_path / "state"), str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_what_cannot_be_exported_is_said(clean, tmp_path, capsys):
    def failure(*arguments):
        with pytest.raises(SystemExit) as error:
            main(["export", *map(str, arguments)])
        assert error.value.code == 2
        return capsys.readouterr().err

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    accelerator, *_ = trained(MODELS["llama"]())
    accelerator.save_state(str(tmp_path / "state"))
    assert "is no folder" in failure(tmp_path / "nothing", tmp_path / "out")
    assert "is not empty" in failure(tmp_path / "state", tmp_path / "full")
    data = bytearray((tmp_path / "state" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "state" / "model.safetensors").write_bytes(data)
    assert "is damaged" in failure(tmp_path / "state", tmp_path / "out")
    assert not (tmp_path / "out").exists()
