"""The benchmarks: they run, judge their targets rightly, and stopping them loses nothing."""

import json

import pytest
import torch

from benchmarks import attention, measure, models
from benchmarks.attention import build, main
from benchmarks.measure import measure_memory, memory_here, peak_bytes
from benchmarks.report import DENSE, FORWARD, HF_LONGFORMER, HYBRID, TRAINING, TRAINING_DROPOUT, Case, Results

TINY = ["--lengths", "32", "64", "--rounds", "2", "--memory-lengths", "--scaling-lengths", "32", "96"]


@pytest.fixture
def tiny_layer(monkeypatch, one_thread):
    sizes = {"HIDDEN_SIZE": 16, "NUM_HEADS": 2, "WINDOW": 16, "BLOCK_SIZE": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(attention, name, size)


@pytest.fixture
def tiny_models(monkeypatch, one_thread):
    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}
    monkeypatch.setattr(models, "SIZES", sizes)
    monkeypatch.setattr(models, "WINDOW", 16)
    monkeypatch.setattr(models, "BLOCK_SIZE", 4)


@pytest.fixture
def one_thread():
    # Threads that share their cores with other processes wait for each other far longer than such small layers take.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case(contender, mode, length):
    return Case(contender=contender, mode=mode, length=length)


def verdicts(results):
    return {target["target"]: target["verdict"] for target in results.report()["targets"]}


def test_writes_results_and_a_picture(tiny_layer, tmp_path, capsys):
    assert main([*TINY, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "attention.json").read_text())
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert len(report["times"]) == 2 * 3 * 3
    assert all(row["rounds"] == 2 and row["best_ratio"] > 0 and row["median_ratio"] > 0 for row in report["times"])
    assert [row["mode"] for row in report["exponents"]] == [FORWARD, TRAINING]
    assert str(tmp_path) not in json.dumps(report)
    assert not list(tmp_path.glob("*.new"))
    assert "Targets" in capsys.readouterr().out


def test_whole_models_side_by_side(tiny_models, tmp_path, capsys):
    assert models.main(["--lengths", "32", "--rounds", "1", "--memory-lengths", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "models.json").read_text())
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
    assert {row["contender"] for row in report["times"]} == set(models.CONTENDERS)
    assert len(report["times"]) == 5 * 3 and all(row["best_ratio"] > 0 for row in report["times"])
    assert "Targets" not in capsys.readouterr().out


@pytest.mark.parametrize("contender", models.CONTENDERS)
def test_models_are_alike_in_what_can_be(tiny_models, contender):
    for mode, rate in ((FORWARD, 0.0), (TRAINING, 0.0), (TRAINING_DROPOUT, 0.1)):
        encoder, input_ids = models.build(case(contender, mode, 32))
        rates = {module.p for module in encoder.modules() if isinstance(module, torch.nn.Dropout)}
        assert rates <= {rate} and encoder.training == (mode != FORWARD)
        assert encoder(input_ids).shape == (1, 32, 16)


@pytest.mark.parametrize("program", [attention, models])
def test_the_command_in_the_results_asks_for_the_same_measurements(program):
    args = program.parse(["--quick", "--lengths", "512", "1024"])
    words = program.command(args).split()
    assert words[:3] == ["python", "-m", program.__name__]
    again = program.parse(words[3:])
    assert program.command(again) == program.command(args)


@pytest.mark.parametrize(
    ("program", "wrong", "said"),
    [
        (attention, ["--lengths", "100"], "100 is none of 512"),
        (attention, ["--lengths", "512", "--rounds", "1", "2"], "or one for each of 1 lengths"),
        (attention, ["--rounds", "0"], "--rounds takes one number of 1 or more"),
        (models, ["--lengths", "512", "--rounds", "1", "2"], "or one for each of 1 lengths"),
        (models, ["--rounds", "0"], "--rounds takes one number of 1 or more"),
        (models, ["--modes", "sideways"], "invalid choice: 'sideways'"),
    ],
)
def test_refuses_what_it_cannot_measure(program, wrong, said, capsys):
    with pytest.raises(SystemExit):
        program.parse(wrong)
    assert said in capsys.readouterr().err


def test_stopping_keeps_what_was_measured(tiny_layer, tmp_path, monkeypatch, capsys):
    # 18 runs at the first length, then two of three contenders at the second.
    seconds = iter([1.0] * 20)

    def stop_after_a_while(module, x):
        for value in seconds:
            return value
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "time_once", stop_after_a_while)
    assert main([*TINY, "--output", str(tmp_path)]) == 130
    report = json.loads((tmp_path / "attention.json").read_text())
    assert len(report["times"]) == 9 + 2
    assert (tmp_path / "attention.png").exists()
    assert "Time, seconds" in capsys.readouterr().out


def test_targets_are_judged_by_the_best_round():
    results = Results(command="")
    for contender, seconds in ((HF_LONGFORMER, [3.3, 9.0]), (HYBRID, [1.0, 9.0])):
        results.times[case(contender, FORWARD, 4096)] = seconds
    for contender, seconds in ((HF_LONGFORMER, [4.2]), (HYBRID, [1.0])):
        results.times[case(contender, TRAINING, 4096)] = seconds
    for contender, growth in ((HF_LONGFORMER, 900.0), (HYBRID, 300.0)):
        results.memory[case(contender, TRAINING, 4096)] = {"peak_mib": growth + 400, "growth_mib": growth}
    for contender, seconds in ((DENSE, [1.0]), (HYBRID, [1.09])):
        results.times[case(contender, FORWARD, 512)] = seconds
    for contender, seconds in ((DENSE, [1.0]), (HYBRID, [1.11])):
        results.times[case(contender, TRAINING, 512)] = seconds
    for mode, seconds in ((FORWARD, 16.0), (TRAINING, 32.0)):
        results.scaling |= {case(HYBRID, mode, 4096): [1.0], case(HYBRID, mode, 65536): [seconds]}
    assert list(verdicts(results).values()) == [
        "met",
        "missed",
        "not measured",
        "met",
        "not measured",
        "met",
        "missed",
        "met",
        "missed",
    ]
    assert [row["exponent"] for row in results.report()["exponents"]] == pytest.approx([1.0, 1.25])


def test_the_exponent_counts_only_over_the_whole_range():
    results = Results(command="", scaling={case(HYBRID, FORWARD, n): [n / 1e4] for n in (4096, 16384)})
    assert set(verdicts(results).values()) == {"not measured"}


def test_dense_dropout_is_skipped_where_it_needs_gigabytes():
    results = Results(command="")
    kept = attention.feasible_cases(
        results, contenders=[DENSE], modes=[TRAINING, TRAINING_DROPOUT], lengths=[4096, 16384], what="time"
    )
    assert len(kept) == 3 and len(results.skipped) == 1 and "12 GiB" in results.skipped[0]


def test_memory_of_a_case(tiny_layer):
    numbers = memory_here(case(HYBRID, TRAINING, 64), build, shortest=16)
    assert 0 < numbers["peak_mib"] <= peak_bytes() / 2**20


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    # A peak that the child must not inherit.
    ballast = bytearray(2**30)
    ballast[:: 2**12] = b"1" * 2**18
    del ballast
    results = Results(command="")
    measured = case(HYBRID, TRAINING, 1024)
    measure_memory(measured, results, program="benchmarks.attention")
    assert not results.skipped
    assert 0 < results.memory[measured]["growth_mib"] < results.memory[measured]["peak_mib"] < peak_bytes() / 2**20
