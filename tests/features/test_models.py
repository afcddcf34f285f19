"""What scripts do to a model: compile its layers, pack its sequences, resize its embeddings, generate between steps."""

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from slideformer_backend.errors import UnsupportedError
from tests.parity.harness import POLICIES, assert_same, check, run_managed
from tests.parity.models import batch, language_loss, llama, stack, steps
from tests.tolerances import ASSOCIATIVITY

ADAMW = {"lr": 1e-2, "fused": True}

each_policy = pytest.mark.parametrize("policy", POLICIES)


class Counting:
    """A backend of torch.compile that runs graphs as they are and counts."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        def run(*arguments):
            self.runs += 1
            return graph.forward(*arguments)

        return run


def in_place(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)


def in_place_with_hooks(model, backend):
    in_place(model, backend)
    model.hook_calls = []
    model.blocks[1].register_forward_hook(lambda *_: model.hook_calls.append("hook"))


def wrapped(model, backend):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)


def parts(model, backend):
    for block in model.blocks:
        block.up.compile(backend=backend)
        block.down = torch.compile(block.down, backend=backend)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@each_policy
@pytest.mark.parametrize("compiled", [in_place, in_place_with_hooks, wrapped, parts], ids=lambda how: how.__name__)
def test_compiled_layers(device, fresh_compiler, policy, compiled):
    """Compiled code runs inside the window, in the forward and in the recompute."""
    backends = []

    def make():
        model = stack()()
        backends.append(Counting())
        compiled(model, backends[-1])
        return model

    def script(run):
        steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), 3)
        run.see("hook calls", len(getattr(run.model, "hook_calls", ())))

    check(make, script, device, policy=policy, tolerance=ASSOCIATIVITY)
    plain, managed = backends
    assert plain.runs > 0
    hooked = compiled is in_place_with_hooks
    assert managed.runs >= (plain.runs if not hooked else 2 * 3), "two blocks without hooks, three steps"


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_is_compiled_again_after_detach(device, fresh_compiler):
    backend = Counting()
    model = stack()()
    in_place(model, backend)
    calls = [block._compiled_call_impl for block in model.blocks]
    run_managed(lambda: model, lambda run: steps(run, run.optimizer(torch.optim.AdamW, **ADAMW), 1), device)
    assert [block._compiled_call_impl for block in model.blocks] == calls
    before = backend.runs
    model(batch(0))
    assert backend.runs > before


@each_policy
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [False, True], ids=["positions", "variable lengths"])
def test_packed_sequences(device, policy, attention, lengths):
    """One row of several texts, told apart by positions; with the lengths that FlashAttention takes, as integers."""

    def make():
        model = llama()()
        model.set_attn_implementation(attention)
        return model

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for number in range(3):
            texts = [batch(3 * number + part, rows=1, length=3 + part)[0].tolist() for part in range(3)]
            packed = collate([{"input_ids": ids} for ids in texts])
            packed = {k: v.to(run.device) if isinstance(v, torch.Tensor) else v for k, v in packed.items()}
            assert packed["input_ids"].shape[0] == 1
            loss = run.forward(**packed).loss
            run.see("loss", loss)
            run.backward(loss)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(make, script, device, policy=policy)


@each_policy
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_resized_before_prepare(device, policy, tied):
    def make():
        model = llama(tie_word_embeddings=tied)()
        model.resize_token_embeddings(96, mean_resizing=False)
        return model.train()

    check(make, lambda run: steps(run, run.optimizer(torch.optim.AdamW, **ADAMW)), device, policy=policy)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_resized_after_prepare_are_refused(device, tied):
    """The new weights would be nobody's: not moved, not trained."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 1)
        with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight.*96, 32.*before accelerator\.prepare"):
            run.model.resize_token_embeddings(96, mean_resizing=False)

    run_managed(llama(tie_word_embeddings=tied), script, device)


@pytest.mark.parametrize("where", ["inside a block", "beside the blocks"])
def test_a_layer_added_after_prepare(device, where):
    """It is nobody's unit: it stays where the script put it and is stepped by the optimizer as itself."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        steps(run, optimizer, 2)
        new = nn.Linear(32, 64, device=run.device)
        if where == "inside a block":
            run.model.blocks[1].up = new
        else:
            run.model.head = new
        optimizer.add_param_group({"params": list(new.parameters())})
        for number in range(2, 4):
            ids = batch(number, device=run.device)
            loss = language_loss(run.forward(ids), ids)
            run.see("loss", loss)
            run.backward(loss)
            run.see_gradients()
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    check(stack(), script, device)


@each_policy
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_generating_leaves_training_as_it_was(device, policy, options):
    """The same run with and without generation in between: not one bit differs."""

    def training(generates):
        def script(run):
            optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
            for number in range(3):
                ids = batch(number, device=run.device)
                loss = language_loss(run.forward(ids), ids)
                if generates:  # also between forward and backward
                    prompt = batch(70 + number, length=4, device=run.device)
                    run.model.eval()
                    run.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)
                    run.model.train()
                run.see("loss", loss)
                run.backward(loss)
                run.see_gradients()
                optimizer.step()
                if generates:
                    run.model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0, **options)
                optimizer.zero_grad()
                run.see_weights()

        return script

    without = run_managed(llama(), training(False), device, policy=policy)
    with_it = run_managed(llama(), training(True), device, policy=policy)
    assert_same(without.seen, with_it.seen)


class Casting(nn.Module):
    """A layer that casts its parts in its forward, as the router of Switch Transformers does."""

    def __init__(self, cast, dtype=torch.float32):
        super().__init__()
        self.up, self.down, self.cast, self.dtype = nn.Linear(8, 16), nn.Linear(16, 8), cast, dtype

    def forward(self, x):
        if self.cast == "to":
            self.up = self.up.to(self.dtype)
        elif self.cast:
            getattr(self.up, self.cast)()
        return x + self.down(torch.sin(self.up(x)))


@pytest.mark.parametrize("cast", ["", "to", "float"])
def test_a_cast_to_the_dtype_that_a_layer_has_changes_nothing(device, active, cast):
    """Under autocast the window holds bf16 weights of an fp32 model."""
    from accelerate import Accelerator

    def losses(cast):
        torch.manual_seed(0)
        model = nn.Sequential(*(Casting(cast) for _ in range(4)))
        accelerator = Accelerator(mixed_precision="bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(2):
            loss = model(torch.ones(2, 8)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()
        accelerator.free_memory()

    assert list(losses(cast)) == list(losses(""))


@pytest.mark.parametrize("cast", ["to", "bfloat16"])
def test_a_cast_to_the_working_dtype_is_refused(device, active, cast):
    from accelerate import Accelerator

    model = nn.Sequential(*(Casting(cast, torch.bfloat16) for _ in range(4)))
    model = Accelerator(mixed_precision="bf16").prepare(model)
    with pytest.raises(UnsupportedError, match=r"dtype of a Linear.*float32.*bfloat16.*before prepare"):
        model(torch.ones(2, 8))
