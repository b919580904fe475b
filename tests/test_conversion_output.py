"""The folder that a conversion writes appears whole or not at all, however the run ends; the command line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybrid_longformer import cli, conversion, conversion_output
from hybrid_longformer.conversion import convert_checkpoint
from hybrid_longformer.conversion_source import ConversionError

from .conversion_cases import OPTIONS, load, make_source, save


class TestOutput:
    @pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
    def test_failure_leaves_nothing(self, stop, tmp_path, monkeypatch):
        def fail(*args):
            raise stop("disk full")

        monkeypatch.setattr(conversion, "_write_tokenizer", fail)
        output = tmp_path / "deeper" / "output"
        with pytest.raises(stop):
            convert_checkpoint(make_source("Roberta", "Model"), output, **OPTIONS)
        assert not list(output.parent.iterdir())

    def test_failure_keeps_what_was_there(self, tmp_path, monkeypatch):
        output = tmp_path / "output"
        output.mkdir()
        (output / "notes.txt").write_text("mine")
        monkeypatch.setattr(Path, "rename", self.failing_rename(Path.rename))
        with pytest.raises(OSError, match="no room"):
            convert_checkpoint(make_source("Roberta", "Model"), output, overwrite=True, verify=False, **OPTIONS)
        assert [path.name for path in tmp_path.iterdir()] == ["output"]
        assert (output / "notes.txt").read_text() == "mine"

    @staticmethod
    def failing_rename(rename):
        def fail_for_parts(path, target):
            if path.name.endswith(".part"):
                raise OSError("no room")
            return rename(path, target)

        return fail_for_parts

    def test_files_are_not_overwritten_unasked(self, tmp_path):
        output = tmp_path / "output"
        output.mkdir()
        (output / "notes.txt").write_text("mine")
        model = make_source("Roberta", "Model")
        with pytest.raises(ConversionError, match="has files in it"):
            convert_checkpoint(model, output, **OPTIONS)
        convert_checkpoint(model, output, overwrite=True, verify=False, **OPTIONS)
        assert not (output / "notes.txt").exists()
        assert (output / "model.safetensors").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["output"]

    def test_source_is_never_replaced(self, tmp_path):
        source = save(make_source("Roberta", "Model"), tmp_path / "models" / "source")
        for output in (source, source.parent):
            with pytest.raises(ConversionError, match="holds the source"):
                convert_checkpoint(source, output, overwrite=True)

    def test_folder_is_self_contained(self, tmp_path):
        source = save(make_source("Roberta", "ForMaskedLM"), tmp_path / "source")
        (source / "README.md").write_text("---\ntags:\n- x\nlicense: apache-2.0\n---\n\n# Source\n")
        output = tmp_path / "my-model"
        report = convert_checkpoint(source, output, **OPTIONS)
        names = {path.name for path in output.iterdir()}
        assert {"config.json", "modeling_hybrid_longformer.py", "configuration_hybrid_longformer.py"} <= names
        assert not [name for name in names if name.startswith(("conversion_", "cli")) and name.endswith(".py")]
        assert json.loads((output / conversion.REPORT_FILE).read_text())["fates"]
        card = (output / "README.md").read_text()
        for part in (
            "license: apache-2.0\n",
            "# my-model",
            "RobertaForMaskedLM",
            "tiled",
            "*_global",
            "from_pretrained",
        ):
            assert part in card
        assert f"{report.verification.largest_difference:.1e}" in card
        assert str(tmp_path) not in card


# A conversion that waits with its weights half written, so that what ends it comes at the worst time.
CONVERT_AND_WAIT = """
import sys, time
from hybrid_longformer import cli, conversion, conversion_output
write_weights = conversion.write_weights
def write_and_wait(*args):
    write_weights(*args)
    print("written", flush=True)
    time.sleep(600)
conversion.write_weights = write_and_wait
sys.exit(cli.main(["convert", *sys.argv[1:], "--max-length", "150", "--attention-window", "16", "--block-size", "4"]))
"""


@contextmanager
def conversion_under_way(source: Path, output: Path) -> Iterator[subprocess.Popen]:
    """Another process that is converting; it ends with the block, whatever happens there."""
    command = [sys.executable, "-c", CONVERT_AND_WAIT, str(source), str(output)]
    root = str(Path(conversion.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "written\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def parts_beside(output: Path) -> list[Path]:
    return list(output.parent.glob(f".{output.name}.*.part"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes without telling them")
class TestStops:
    def test_sigterm_leaves_nothing(self, tmp_path):
        source, output = save(make_source("Roberta", "Model"), tmp_path / "source"), tmp_path / "deeper" / "output"
        with conversion_under_way(source, output) as process:
            (part,) = parts_beside(output)
            assert (part / "model.safetensors").exists()
            process.terminate()
            _, said = process.communicate()
        assert process.returncode == 128 + signal.SIGTERM
        assert "stopped; nothing was written" in said and "Traceback" not in said
        assert not list(output.parent.iterdir())

    def test_killed_run_is_cleared_away_by_the_next_and_a_running_one_is_left_alone(self, tmp_path):
        source, output = save(make_source("Roberta", "Model"), tmp_path / "source"), tmp_path / "deeper" / "output"
        with conversion_under_way(source, output) as process:
            (part,) = parts_beside(output)
            convert_checkpoint(source, output, verify=False, **OPTIONS)
            assert parts_beside(output) == [part] and (part / "model.safetensors").exists()
            process.kill()
            process.wait()
        assert parts_beside(output) == [part]
        convert_checkpoint(source, output, verify=False, overwrite=True, **OPTIONS)
        assert [path.name for path in output.parent.iterdir()] == ["output"]

    def test_what_was_being_replaced_comes_back(self, tmp_path):
        """A kill between the two renames leaves the old folder under its hidden name."""
        (tmp_path / ".output.0123abcd.old").mkdir()
        (tmp_path / ".output.0123abcd.old" / "notes.txt").write_text("mine")
        (tmp_path / ".output.0123abcd.part").mkdir()
        with pytest.raises(ConversionError, match="has files in it"):
            convert_checkpoint(make_source("Roberta", "Model"), tmp_path / "output", **OPTIONS)
        assert [path.name for path in tmp_path.iterdir()] == ["output"]
        assert (tmp_path / "output" / "notes.txt").read_text() == "mine"

    def test_works_where_files_cannot_be_locked(self, tmp_path, monkeypatch):
        def refuse(*args, **options):
            raise OSError("no locks available")

        monkeypatch.setattr(conversion_output.FileLock, "acquire", refuse)
        (tmp_path / ".output.0123abcd.part").mkdir()
        convert_checkpoint(make_source("Roberta", "Model"), tmp_path / "output", verify=False, **OPTIONS)
        # Somebody may still be writing it.
        assert {path.name for path in tmp_path.iterdir()} == {"output", ".output.0123abcd.part"}

    def test_neighbours_of_other_outputs_stay(self, tmp_path):
        names = {".output.2.0123abcd.part", ".output.part", ".output.notahexa.part", "output.0123abcd.part"}
        for name in names:
            (tmp_path / name).mkdir()
        convert_checkpoint(make_source("Roberta", "Model"), tmp_path / "output", verify=False, **OPTIONS)
        assert {path.name for path in tmp_path.iterdir()} == names | {"output"}


class TestCommandLine:
    def test_convert_and_export(self, tmp_path, capsys):
        source = save(make_source("Roberta", "ForMaskedLM"), tmp_path / "source")
        arguments = ["--max-length", "150", "--attention-window", "8", "16", "--num-random-blocks", "0"]
        assert cli.main(["convert", str(source), str(tmp_path / "hybrid"), *arguments]) == 0
        printed = capsys.readouterr().out
        assert "largest difference to RobertaForMaskedLM" in printed
        assert "| hybrid_longformer.embeddings.position_embeddings | 1 | tiled |" in printed
        assert load(tmp_path / "hybrid").config.attention_window == [8, 16]
        assert cli.main(["export-longformer", str(tmp_path / "hybrid"), str(tmp_path / "longformer")]) == 0
        assert "LongformerForMaskedLM" in capsys.readouterr().out

    def test_errors_are_one_line(self, tmp_path, capsys):
        assert cli.main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "output")]) == 1
        assert capsys.readouterr().err.startswith("error: there is no folder")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_stop_the_command_and_are_then_handled_as_before(self, number, tmp_path, capsys, monkeypatch):
        def interrupt(*args, **options):
            signal.raise_signal(number)

        monkeypatch.setattr(cli, "convert_checkpoint", interrupt)
        before = signal.getsignal(signal.SIGTERM)
        # A shell lets what it starts in the background ignore Ctrl-C.
        outer = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            assert cli.main(["convert", str(tmp_path), str(tmp_path / "output")]) == 128 + number
        finally:
            signal.signal(signal.SIGINT, outer)
        assert "stopped; nothing was written" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGTERM) is before

    def test_runs_outside_the_main_thread_too(self, tmp_path):
        with ThreadPoolExecutor(1) as threads:
            arguments = ["convert", str(tmp_path / "nowhere"), str(tmp_path / "output")]
            assert threads.submit(cli.main, arguments).result() == 1
