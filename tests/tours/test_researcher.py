"""A researcher: a loop of their own that trains with others, its mistakes, and a model of their own in a run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from scripts.waiting import eventually
from tests.worlds.processes.processes import LISTEN, processes
from tests.worlds.processes.tour import shells

ROOT = Path(__file__).resolve().parents[2]
LOOP = """\
import sys, peerd, torch
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(2))
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
opt = peerd.AveragingOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), run="line", target_samples=32, samples_per_step=8, model=model,
    bootstrap=sys.argv[2:], wait_s=3, min_peers=1 if sys.argv[1] != "pair" else 2,
    announce=lambda address: print(address, flush=True),
    scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 20, 0.5),
)
with opt:
    while opt.global_step < 40:
        batch = torch.randint(len(x), (8,))
        loss = torch.nn.functional.mse_loss(model(x[batch]), y[batch])
        (loss * float("nan") if sys.argv[1] == "nan" and opt.global_step > 1 else loss).backward()
        opt.step()
        opt.zero_grad()
print("done", f"{loss.item():.4f}", opt.digest()[:16], flush=True)
"""

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(600)]


@pytest.mark.thorough
def test_a_researchers_loop_trains_with_another_and_its_mistakes_are_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with shells(tmp_path, "researcher") as (shell,):
        (shell.home / "loop.py").write_text(LOOP)
        python = f"{sys.executable} -u loop.py"
        dead = shell.run(f"{python} one /ip4/127.0.0.1/tcp/9")
        assert dead.code == 1
        assert "reached no peer at the bootstrap address /ip4/127.0.0.1/tcp/9: connection refused" in dead.text
        wrong = shell.run(f"{python} nan")
        assert wrong.code == 1
        assert "the gradient of weight is not finite (4 of 4 values)" in wrong.text
        first = shell.start(f"{python} pair")
        address = first.wait_for(r"/ip4/127\S+|/ip4/\S+")[0]
        second = shell.run(f"{python} pair {address}")
        assert second.code == 0
        assert first.wait_for(r"done \S+ (\w+)")[1] == second.text.split()[-1]  # the same parameters, bit for bit


@pytest.mark.thorough
def test_a_model_of_ones_own_is_tried_trains_and_comes_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with processes(tmp_path) as started, shells(tmp_path, "researcher") as (shell,):
        shutil.copytree(ROOT / "configs", shell.home / "configs")
        run = shell.home / "configs" / "own_model.yaml"
        text = run.read_text().replace("layers: 4 ", "layers: 1 ").replace("target_samples: 32", "target_samples: 8")
        run.write_text(text + "checkpoint: {every_steps: 2}\n")
        source = shell.home / "configs" / "own_model.py"
        right = source.read_text()
        addr = started.backbone().address()
        join = f"peerd join --model configs/own_model.yaml --bootstrap {addr} --listen {LISTEN}"
        source.write_text(right.replace("nn.Linear(width, 256)", "nn.Linear(width, 100)"))
        for role in ("stage", "trainer"):
            shell.run(f"{join} --role {role}").one_sentence("layer 2 (Linear) got", "and returned", "expected", code=2)
        source.write_text(right)
        for name, role in (("a", "stage"), ("b", "stage"), ("c", "trainer")):
            shell.start(f"{join} --role {role} --data-dir peers/{name}").wait_for("role.started")
        saved = "checkpoint.saved.* step=4"
        for window in shell.running[:2]:
            window.wait_for(saved)
        assert all(window.ctrl_c() == 0 for window in shell.running)
        assert shell.run("peerd export peers --out model").code == 0
        weights = shell.home / "model" / "model.safetensors"
        assert eventually(weights.exists, 1)
        said = shell.run("peerd evaluate --from model --model configs/own_model.yaml configs/own_model.py")
        assert said.code == 0
        assert "perplexity" in said.text
