"""The command line: help for every command, at every depth."""

import pytest

from hybrid_longformer.cli import main


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--help"], "fine-tune a checkpoint on long documents"),
        (["finetune", "--help"], "{qa,summarise,mlm}"),
        (["finetune", "qa", "--help"], "--negatives-per-question"),
        (["finetune", "mlm", "--help"], "of these 80% are masked"),
    ],
)
def test_help_is_printed(capsys, argv, said):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 0
    printed = capsys.readouterr().out.split()
    assert said in " ".join(printed)
    assert "rest" not in printed
