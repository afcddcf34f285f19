"""PEFT over sliding frozen weights: as plain, and frozen units own no states."""

import pytest
import torch

from slideformer_backend.api import attach
from slideformer_backend.errors import UnsupportedError
from tests.parity.harness import POLICIES, PRECISIONS, check, run_managed
from tests.parity.models import batch, language_loss, llama, steps

peft = pytest.importorskip("peft", reason="peft is part of the extra [bench]")

# PEFT calls transformers by names that are on their way out.
pytestmark = pytest.mark.filterwarnings("ignore:.* (is deprecated|will be removed):FutureWarning")

ADAMW = {"lr": 1e-2, "fused": True, "weight_decay": 0.1}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**options):
    return peft.LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM", **options)


TIED = {"tie_word_embeddings": True}
# name -> adapter, options of the model
ADAPTERS = {
    "lora": (lora(lora_dropout=0.1), {}),
    "lora with biases": (lora(bias="all"), {"attention_bias": True}),
    "rank-stabilised lora": (lora(use_rslora=True), {}),
    "dora": (lora(use_dora=True), {}),
    "lora on a tied model": (lora(), TIED),
    "lora of an embedding": (peft.LoraConfig(r=16, target_modules=["embed_tokens", "q_proj"]), {}),
    "lora of the head": (peft.LoraConfig(r=16, target_modules="all-linear"), {}),
    "modules to save": (lora(modules_to_save=["lm_head", "embed_tokens"]), {}),
    "modules to save of a tied model": (lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True), TIED),
    "modules to save inside blocks": (lora(modules_to_save=["input_layernorm"]), {}),
    "trainable tokens": (lora(trainable_token_indices=list(range(3, 19))), {}),
    "ia3": (
        peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        {},
    ),
    "prefix tuning": (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), {}),
    "prompt tuning": (peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), {}),
    "layers only": (lora(layers_to_transform=[1]), {}),
}


def adapted(name, dtype=torch.float32):
    config, options = ADAPTERS[name]

    def make():
        model = peft.get_peft_model(llama(dtype, **options)(), config)
        for parameter in model.parameters():  # adapters start at zero: give every factor a gradient
            if parameter.requires_grad and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
        return model.train()

    return make


def training(policy):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            micros = 2 if policy == "exact" else 1
            for micro in range(micros):
                ids = batch(2 * number + micro, length=6 + number % 3, device=run.device)
                loss = run.forward(input_ids=ids, labels=ids).loss / micros
                run.see("loss", loss)
                run.backward(loss, is_last=micro == micros - 1)
            run.see_gradients()
            if policy == "exact":
                run.clip(0.05)
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    return script


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(device, name, policy, precision):
    dtype, autocast = PRECISIONS[precision]
    check(adapted(name, dtype), training(policy), device, policy=policy, autocast=autocast)


def test_tied_adapters_are_refused(device):
    """PEFT ties them as two parameters over one memory, of which each has states and a step of its own."""
    config = peft.LoraConfig(r=16, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    model = peft.get_peft_model(llama(**TIED)(), config)
    with pytest.raises(UnsupportedError, match=r"lora_embedding_[AB].* two parameters over the same memory.*PEFT"):
        attach(model, device=device)


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_units_own_no_states(device, policy):
    """Only what trains has masters, moments and gradients; frozen weights slide one way."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        run.engine.settle()
        trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        for unit in run.engine.units:
            if not unit.trainable:
                assert unit.states == {}
                assert unit.gradient is None
                assert unit.layout.state_elements == unit.layout.gradient_bytes == 0
        held = sum(slab.nbytes for unit in run.engine.units for slab in unit.states.values())
        assert 0 < held <= 3 * 4 * 2 * trained, "moments (and masters) of trained parameters, aligned"

    run_managed(adapted("layers only", torch.bfloat16), script, device, policy=policy)


def test_adapters_switched_off_and_on(device):
    """A reference without a second copy: the base model is the adapted one with its adapters disabled."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            ids = batch(number, device=run.device)
            with torch.no_grad(), run.model.disable_adapter():
                reference = run.forward(ids).logits.log_softmax(-1)
            run.see("reference", reference)
            scores = run.forward(ids).logits.log_softmax(-1)
            distance = torch.nn.functional.kl_div(scores, reference, reduction="batchmean", log_target=True)
            run.backward(distance + language_loss(run.forward(ids), ids))
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(adapted("lora"), script, device)


def test_merging_after_training(device):
    def script(run):
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), 2)
        ids = batch(9, device=run.device)
        run.model.merge_adapter()
        with torch.no_grad():
            run.see("merged", run.model(ids).logits)
        run.model.unmerge_adapter()
        run.see_weights()

    check(adapted("lora"), script, device)


def test_gradient_checkpointing_and_input_gradients(device):
    """Hazard: frozen embeddings and checkpointing gave no gradient at all elsewhere."""

    def make():
        model = adapted("lora")()
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        return model

    check(make, training("exact"), device)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradual_unfreezing(device, policy, precision):
    """The adapters first, then layers of the base model too, from the last one on; the adapters rest meanwhile."""
    dtype, autocast = PRECISIONS[precision]

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        adapters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        for number in (2, 1):
            layer = run.model.base_model.model.model.layers[number]
            base = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
            for parameter in base:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": base, "lr": 1e-3})
            steps(run, optimizer, 2, first=6 - 2 * number)
        for parameter in adapters:
            parameter.requires_grad_(False)
        steps(run, optimizer, 1, first=6)

    check(adapted("modules to save", dtype), script, device, policy=policy, autocast=autocast)


@pytest.mark.parametrize("policy", POLICIES)
def test_another_adapter_is_activated(device, policy):
    """``set_adapter`` freezes one adapter and unfreezes another, which was frozen at ``prepare``."""

    def make():
        model = adapted("lora")()
        model.add_adapter("other", lora())
        for name, parameter in model.named_parameters():
            if ".other." in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.set_adapter("default")
        return model

    def script(run):
        optimizer = run.bind(torch.optim.AdamW(run.model.parameters(), **ADAMW))
        for number, adapter in enumerate(("default", "other", "default")):
            run.model.set_adapter(adapter)
            steps(run, optimizer, 2, first=2 * number)

    check(make, script, device, policy=policy)
