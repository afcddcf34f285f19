"""A save or load needs no more host memory than one unit beside what training has."""

import pytest

CHILD = """
import os, subprocess, sys, time, torch
from pathlib import Path
sys.path.insert(0, {root!r})
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
from slideformer_backend import SlideFormerPlugin, api

WATCH = '''
import sys, time
peak = 0
print("ready", flush=True)
while True:
    try:
        text = open(f"/proc/{{sys.argv[1]}}/status").read()
    except OSError:
        break
    peak = max(peak, int(text.split("RssAnon:")[1].split()[0]))
    print(peak, flush=True)
    time.sleep(0.002)
'''

def anonymous():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])

def extra(call):
    before = anonymous()
    watch = subprocess.Popen([sys.executable, "-c", WATCH, str(os.getpid())], stdout=subprocess.PIPE)
    watch.stdout.readline()
    call()
    time.sleep(0.05)
    watch.kill()
    return (max(map(int, watch.stdout.read().split()[:-1])) - before) * 1024

torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=64,
                                     num_attention_heads=4, use_cache=False)).to(torch.bfloat16)
accelerator = Accelerator(cpu=True, kwargs_handlers=[SlideFormerPlugin(status="off", update={update!r})])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
ids = torch.arange(8)[None]
for _ in range(2):
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
engine = api.engine_of(model)
engine.settle()
unit = max(engine.sliding, key=lambda unit: unit.layout.weight_bytes)
size = unit.layout.weight_bytes + sum(slab.nbytes for slab in unit.states.values())
whole = sum(u.layout.weight_bytes + sum(slab.nbytes for slab in u.states.values()) for u in engine.sliding)
assert whole >= 8 * size
accelerator.save_state("warm")
print("one unit", size, "save", extra(lambda: accelerator.save_state("state")),
      "load", extra(lambda: accelerator.load_state("state")))

from transformers import Trainer, TrainingArguments
trainer = Trainer(model=model, args=TrainingArguments("out", report_to="none", use_cpu=True), train_dataset=[1])
trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)
trainer._save_checkpoint(model, None)
print("trainer", extra(lambda: trainer._save_checkpoint(model, None)))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("update", ["exact", "immediate"])
def test_extra_host_memory_is_at_most_one_unit(python, tmp_path, update):
    from tests.launch.conftest import ROOT

    (tmp_path / "child.py").write_text(CHILD.format(root=str(ROOT), update=update))
    said = python("child.py", OMP_NUM_THREADS="1")
    words = said.split("one unit ")[1].split()
    unit, saved, loaded = int(words[0]), int(words[2]), int(words[4])
    trained = int(said.split("trainer ")[1].split()[0])
    assert unit > 40_000_000
    assert saved < unit, f"{saved} bytes beside one unit's {unit}"
    assert loaded < unit, f"{loaded} bytes beside one unit's {unit}"
    assert trained < unit, f"{trained} bytes beside one unit's {unit}"
