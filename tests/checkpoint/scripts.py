"""An ordinary Accelerate script over a small model with dropout, so that random generators count."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from transformers import LlamaConfig, LlamaForCausalLM

from slideformer_backend import SlideFormerPlugin
from slideformer_backend.integrations.session import session
from slideformer_backend.optim.lion import Lion

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "use_cache": False,
    "attention_dropout": 0.2,
    "attn_implementation": "eager",
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1),
    "lion": lambda p: Lion(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
PRECISIONS = {
    "fp32": (torch.float32, "no"),
    "bf16 model": (torch.bfloat16, "no"),
    "bf16 autocast": (torch.float32, "bf16"),
    "fp16 scaled": (torch.float32, "fp16"),
}


def model_of(dtype=torch.float32, seed=0, **more):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more})).to(dtype)


def batch(number):
    generator = torch.Generator().manual_seed(1000 + number)
    rows = torch.randint(0, 64, (2, 8), generator=generator)
    return {"input_ids": rows, "labels": rows}


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one, two):
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


class Script:
    """``update``: a policy, or None for a run without SlideFormer. ``folder``: of automatic checkpoints. ``frozen``:
    words in the names of parameters that are frozen at first."""

    def __init__(
        self, update="exact", precision="fp32", rule="adamw", seed=0, folder=None, limit=None, clip=0.5, frozen=()
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        session.reset()
        dtype, mixed = PRECISIONS[precision]
        handlers = [SlideFormerPlugin(status="off", update=update)] if update else None
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit)
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=mixed, kwargs_handlers=handlers, project_config=project if folder else None
        )
        model = model_of(dtype, seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(word in name for word in frozen))
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        optimizer = OPTIMIZERS[rule]([{"params": decayed}, {"params": rest, "lr": 2e-2}])
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.clip = clip if update != "immediate" else None
        self.losses = []

    def train(self, first, count):
        for number in range(first, first + count):
            loss = self.model(**batch(number)).loss
            self.accelerator.backward(loss)
            if self.clip is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self
