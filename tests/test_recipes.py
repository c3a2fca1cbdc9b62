"""The code of docs/recipes.md does what the page says of it."""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import TensorDataset

import faststep
from faststep.doctor import Answer
from programs import Programs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.read_text().split("\n## ")}
OPTIM = pytest.mark.parametrize("optim", [torch.optim, faststep.optim], ids=["torch", "faststep"])


def blocks(title: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", SECTIONS[title], re.DOTALL | re.MULTILINE)


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, below its heading."""
    lines = [line for line in SECTIONS[title].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches(count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    xs = torch.randn(count, size, 4, dtype=torch.float64, generator=source)
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def equal(one: Any, other: Any) -> bool:
    """Whether two state dicts have the same bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    """But for the rounding of fp64."""
    for ours, wanted in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


# ---- in-place operations


def leaves() -> tuple[Tensor, Tensor]:
    w = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    return w, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def true_gradient(code: str) -> Tensor:
    """By differences of what forward computes."""
    sums = []
    for change in (1e-6, -1e-6):
        for index in range(3):
            w, x = leaves()
            w.data[index] += change
            sums.append(run(code, w=w, x=x)["y"].detach().sum())
    return (torch.stack(sums[:3]) - torch.stack(sums[3:])) / 2e-6


@pytest.mark.parametrize(("code", "outcome"), [row[:2] for row in rows("In-place operations")])
def test_an_operation_in_place(code: str, outcome: str) -> None:
    code = code.strip("`")
    w, x = leaves()
    if outcome == "raises at once":
        with pytest.raises(RuntimeError, match=r"in-place operation|modified inplace"):
            run(code, w=w, x=x)
        return
    y = run(code, w=w, x=x)["y"]
    if outcome == "backward raises":
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            y.sum().backward()
        return
    y.sum().backward()
    assert w.grad is not None
    assert torch.allclose(w.grad, true_gradient(code)) is (outcome == "safe")
    assert outcome in ("safe", "wrong gradient, no error")


def test_parameters_are_changed_in_place() -> None:
    model, other = net(), net()
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in batches(3):
        run(blocks("In-place operations")[0], model=model, loss_fn=mse_loss, x=x, y=y, torch=torch)
        sgd.zero_grad()
        mse_loss(other(x), y).backward()
        sgd.step()
    assert_alike(model, other)


def test_the_line_of_a_wrong_operation_is_found() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.exp()  # this one
        y += 1
        return y

    x = torch.ones(2, requires_grad=True)
    code = blocks("In-place operations")[1]
    with (
        pytest.warns(UserWarning, match=r"(?s)ExpBackward0.*y = x\.exp\(\)  # this one"),
        pytest.raises(RuntimeError, match="inplace operation"),
    ):
        run(code, model=model, loss_fn=mse_loss, x=x, y=torch.ones(2), torch=torch)


# ---- the schedule


@pytest.mark.parametrize(
    ("optim", "amp"),
    [(torch.optim, torch.amp), (faststep.optim, faststep.amp)],
    ids=["torch", "faststep"],
)
def test_the_learning_rate_follows_the_formula(optim: Any, amp: Any) -> None:
    """It is torch's linear rise and then its cosine; a step that is skipped does not count."""
    [code] = blocks("Warm-up and cosine decay")
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=0.5)
    used: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    loader = batches(300)
    loader[40][0].fill_(math.inf)
    names = {"model": model, "loss_fn": mse_loss, "loader": loader, "optimizer": optimizer}
    code = code.replace("WARM_UP, STEPS = 100, 1000", "WARM_UP, STEPS = 100, 299")
    scheduler = run(code, scaler=amp.GradScaler("cpu"), **names)["scheduler"]

    parts = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    wanted = SequentialLR(
        parts, [LinearLR(parts, 0.01, 1.0, 99), CosineAnnealingLR(parts, 199)], [100]
    )
    rates = []
    for _ in range(299):
        rates.append(parts.param_groups[0]["lr"])
        parts.step()
        wanted.step()
    assert [rates[0], rates[99], rates[100]] == pytest.approx([0.005, 0.5, 0.5])
    assert scheduler.last_epoch == 299
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-12)
    assert "factor" not in scheduler.state_dict()
    assert used == pytest.approx(rates, abs=1e-9)


def test_a_scheduler_before_the_optimizer_skips_a_rate() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0)
    [code] = blocks("Warm-up and cosine decay")
    scheduler = run(code, loader=[], optimizer=optimizer)["scheduler"]
    assert scheduler.get_last_lr() == [0.01]
    with pytest.warns(UserWarning, match="before `optimizer.step\\(\\)`"):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.02]


# ---- early stopping

LOSSES = [3.0, 2.0, math.nan, 2.5, 2.0, 1.0]


def trained(optim: Any, code: str | int) -> tuple[nn.Module, Any, list[int]]:
    """By the recipe on these losses, or by so many epochs without it."""
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    ran: list[int] = []

    def train_one_epoch() -> None:
        for x, y in batches(3):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        ran.append(len(ran))

    if isinstance(code, str):
        names = {"model": model, "optimizer": optimizer, "train_one_epoch": train_one_epoch}
        run(code, **names, evaluate=lambda: LOSSES[ran[-1]])
    else:
        for _ in range(code):
            train_one_epoch()
    return model, optimizer, ran


@OPTIM
def test_the_best_weights_come_back(optim: Any) -> None:
    [code] = blocks("Early stopping")
    model, optimizer, ran = trained(optim, code)
    best, at_best, _ = trained(optim, 2)
    assert ran == [0, 1, 2, 3, 4]
    assert equal(model.state_dict(), best.state_dict())
    assert equal(optimizer.state_dict(), at_best.state_dict())
    for one, its_optimizer in ((model, optimizer), (best, at_best)):  # both go on alike
        its_optimizer.zero_grad()
        mse_loss(one(batches(1)[0][0]), batches(1)[0][1]).backward()
        its_optimizer.step()
    assert equal(model.state_dict(), best.state_dict())


def test_without_a_copy_the_last_weights_stay() -> None:
    [code] = blocks("Early stopping")
    wrong = code.replace("copy.deepcopy((", "((")
    assert wrong != code
    model, last = trained(torch.optim, wrong)[0], trained(torch.optim, 5)[0]
    assert equal(model.state_dict(), last.state_dict())


# ---- the curriculum

DIFFICULTY = torch.tensor([5, 1, 9, 0, 7, 3, 8, 2, 6, 4]).repeat(4) + torch.arange(40) / 100


def drawn(code: str, workers: int) -> list[list[Tensor]]:
    """The batches of each epoch, which are the numbers of samples."""
    seen: list[list[Tensor]] = [[]]
    code = code.replace("    share =", "    begin()\n    share =")
    code = code.replace("batch_size=8,", f"batch_size=8, num_workers={workers},")
    torch.manual_seed(7)
    run(
        code,
        torch=torch,
        difficulty=DIFFICULTY,
        dataset=TensorDataset(torch.arange(40), torch.zeros(40)),
        begin=lambda: seen.append([]),
        train_one_step=lambda x, y: seen[-1].append(x.clone()),
    )
    return seen[1:]


@pytest.mark.parametrize("workers", [0, 1])
def test_easy_samples_come_first(workers: int) -> None:
    [code] = blocks("Curriculum")
    ours = drawn(code, workers)
    theirs = drawn(code.replace("from faststep.data", "from torch.utils.data"), workers)
    assert equal(ours, theirs)
    by_difficulty = sorted(range(40), key=lambda index: float(DIFFICULTY[index]))
    for epoch, count in zip(ours, (10, 20, 30, 40, 40, 40), strict=True):
        indices = torch.cat(epoch).tolist()
        assert sorted(indices) == sorted(by_difficulty[:count])
        assert indices != by_difficulty[:count]  # in random order
        assert len(epoch) == math.ceil(count / 8)


@pytest.mark.parametrize("data", [torch.utils.data, faststep.data], ids=["torch", "faststep"])
def test_one_epoch_from_easy_to_hard(data: Any) -> None:
    order = torch.argsort(DIFFICULTY, stable=True).tolist()
    dataset = TensorDataset(torch.arange(40))
    [made] = re.findall(r"`(DataLoader\(dataset.*?\))`", SECTIONS["Curriculum"])
    loader = run(f"loader = {made}", DataLoader=data.DataLoader, dataset=dataset, order=order)[
        "loader"
    ]
    assert torch.cat([x for [x] in loader]).tolist() == order


# ---- larger batches


@OPTIM
def test_micro_batches_are_one_large_batch(optim: Any) -> None:
    """Of 4, 4 and 2 micro-batches. SGD's weights tell the gradients, AdamW's not their size."""
    [code] = blocks("Larger batches")
    micro, model, large = batches(10), net(), net()
    one, other = (optim.SGD(some.parameters(), lr=0.1) for some in (model, large))
    run(code, model=model, optimizer=one, loader=micro, loss_fn=mse_loss)
    for at in (0, 4, 8):
        x, y = (torch.cat(some) for some in zip(*micro[at : at + 4], strict=True))
        other.zero_grad()
        mse_loss(large(x), y).backward()
        other.step()
    assert_alike(model, large)


# ---- Linux

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
READS = [row[1].strip("`") for row in rows("Linux settings")]


@pytest.mark.parametrize("command", READS)
def test_a_setting_can_be_read(command: str) -> None:
    program, path = shlex.split(command)[0], shlex.split(command)[-1]
    assert program in ("cat", "df")
    if not Path(path).exists():
        pytest.skip(f"this system has no {path}")
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
    patterns = {"swappiness": r"\d+\n", "online": r"[\d,-]+\n", "governor": r"\w+\n"}
    patterns |= {"enabled": r".*\[(always|madvise|never)\].*\n", "shm": r"(?s).*/dev/shm\n"}
    [pattern] = [value for name, value in patterns.items() if path.endswith(name)]
    assert re.fullmatch(pattern, done.stdout)


@pytest.mark.skipif(
    not HUGE_PAGES.is_file() or "[madvise]" not in HUGE_PAGES.read_text(),
    reason="programs do not choose huge pages on this system",
)
def test_torch_takes_huge_pages_when_asked(programs: Programs) -> None:
    """So the same tensors cause fewer page faults."""
    [setting] = re.findall(r"`(THP_\w+)=1 python train.py`", SECTIONS["Linux settings"])
    code = (
        "import torch, resource\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "before = faults()\n"
        "for _ in range(4): torch.ones(1 << 24)\n"
        "print(faults() - before)"
    )
    counts = [int(programs.run(code, **env).stdout) for env in ({}, {setting: "1"})]
    assert counts[1] < counts[0] / 2


def test_two_answers_of_the_doctor_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = blocks("Linux settings")
    found = {"threads": 2, "cores": 2, "peak": 1, "cpu": 1.0, "machine": {}, "switched": {}}
    for name, seconds, phases in (("before", 0.2, {"data": 0.5}), ("after", 0.1, {})):
        answer = Answer("", phases, [], [], None, {**found, "steps": [seconds] * 4}, [], [])
        Path(f"{name}.json").write_text(json.dumps(answer.as_json()))
    run(code)
    assert capsys.readouterr().out == f"2.00x\n{'data':16} 50.0% -> 0.0%\n"
