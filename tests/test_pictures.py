"""Pictures show the graph that the model computes with, files are written, and the demo's own checks hold."""

import builtins
from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_rgba

from hybrid_longformer import AttentionPattern, HybridLongformerConfig, demo, pictures
from hybrid_longformer.batch import describe_batch
from hybrid_longformer.pattern import dense_mask
from hybrid_longformer.picture_rules import Rule, edge_rules, one_row_batch
from hybrid_longformer.pictures import (
    RULE_COLOURS,
    draw_attention_map,
    draw_layers,
    draw_overview,
    draw_pattern,
    main,
)

LENGTH = 97
PLAIN = AttentionPattern(window=8, dilation_per_head=(1, 1), num_random_blocks=2, block_size=5, seed=3)
TWO_DOCUMENTS = [7] * 50 + [9] * 47
CASES = {
    "plain": (PLAIN, {}),
    "no rule but the window": (replace(PLAIN, num_random_blocks=0), {"global_positions": ()}),
    "globals": (PLAIN, {"global_positions": (0, 40)}),
    "padding": (PLAIN, {"global_positions": (0, 40), "padding": 23}),
    "causal": (replace(PLAIN, is_causal=True), {"global_positions": (0, 40), "padding": 4}),
    "dilation per head": (replace(PLAIN, dilation_per_head=(1, 3)), {"global_positions": (5,)}),
    "packed documents": (PLAIN, {"global_positions": (0, 60), "document_ids": TWO_DOCUMENTS, "padding": 6}),
}


def small_config(**options) -> HybridLongformerConfig:
    return HybridLongformerConfig(
        **{"num_hidden_layers": 5, "attention_window": 8, "block_size": 4, "num_random_blocks": 2, **options}
    )


def drawn_cells(panel):
    return torch.as_tensor(panel.images[0].get_array().data)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head", [0, 1])
def test_rules_cover_exactly_the_edges(name, head):
    pattern, options = CASES[name]
    batch = one_row_batch(length=LENGTH, **options)
    edges = dense_mask(
        batch.edges(pattern), batch_size=1, num_heads=2, length=LENGTH, device=torch.device("cpu")
    ).expand(1, 2, LENGTH, LENGTH)[0, head]
    assert torch.equal(edge_rules(pattern, batch, head=head) != Rule.NONE, edges)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head", [0, 1])
def test_each_edge_is_named_by_its_first_rule(name, head):
    """The rules written out as arithmetic: global before window, window before random."""
    pattern, options = CASES[name]
    rules = edge_rules(pattern, one_row_batch(length=LENGTH, **options), head=head)
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    is_global = torch.isin(torch.arange(LENGTH), torch.tensor(options.get("global_positions", ()), dtype=torch.long))
    by_global = is_global[:, None] | is_global[None]
    dilation = pattern.dilation_per_head[head]
    by_window = ((i - j).abs() <= dilation * 4) & ((i - j) % dilation == 0) & ~by_global
    document = torch.tensor(options.get("document_ids", [0] * LENGTH))
    possible = (torch.maximum(i, j) < LENGTH - options.get("padding", 0)) & (document[:, None] == document[None])
    if pattern.is_causal:
        possible &= j <= i
    assert torch.equal(rules == Rule.GLOBAL, possible & by_global)
    assert torch.equal(rules == Rule.WINDOW, possible & by_window)
    assert not ((rules == Rule.RANDOM) & ~(possible & ~by_global & ~by_window)).any()
    assert (rules == Rule.GLOBAL).any() == is_global.any()
    assert (rules == Rule.RANDOM).any() == (pattern.num_random_blocks > 0)


def test_rules_of_the_chosen_row_of_a_batch():
    global_mask = torch.zeros(2, 30, dtype=torch.bool)
    global_mask[1, 17] = True
    batch = describe_batch(
        batch_size=2,
        length=30,
        device=torch.device("cpu"),
        global_mask=global_mask,
    )
    assert not (edge_rules(PLAIN, batch, row=0) == Rule.GLOBAL).any()
    assert (edge_rules(PLAIN, batch, row=1)[17] == Rule.GLOBAL).all()


def test_picture_holds_the_rules_in_their_colours(tmp_path):
    options = {"length": LENGTH, "global_positions": (0, 40), "padding": 9}
    figure = draw_pattern(PLAIN, **options, head=1, path=tmp_path / "new" / "pattern.png")
    panel = figure.axes[0]
    rules = edge_rules(PLAIN, one_row_batch(**options), head=1)
    assert torch.equal(drawn_cells(panel), rules)
    image = panel.images[0]
    for rule in Rule:
        assert image.cmap(image.norm(int(rule))) == pytest.approx(to_rgba(RULE_COLOURS[rule]))
    assert (tmp_path / "new" / "pattern.png").stat().st_size > 1000
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["global token", "window", "random block", "not seen", "padding"]


def test_title_states_pattern_and_edges():
    pattern = replace(PLAIN, dilation_per_head=(1, 3), is_causal=True)
    title = draw_pattern(pattern, length=LENGTH, head=1).axes[0].get_title()
    edges = int((edge_rules(pattern, one_row_batch(length=LENGTH, global_positions=(0,)), head=1) > 0).sum())
    assert title == (
        f"head 1: {edges:,} edges, {edges / LENGTH**2:.1%} of 97²\n"
        "window 8, dilation 3, 2 random blocks of 5, seed 3, causal"
    )
    assert draw_pattern(small_config(), length=9, layer=4).axes[0].get_title().startswith("layer 4, head 0: ")


def test_a_lone_pattern_is_layer_0():
    with pytest.raises(ValueError, match="layer=2 does not exist: there are 1"):
        draw_pattern(PLAIN, length=9, layer=2)


def test_thin_lines_survive_in_long_pictures():
    figure = draw_pattern(small_config(num_random_blocks=0), length=1500, global_positions=(700,))
    cells = drawn_cells(figure.axes[0])
    assert cells.shape[0] <= 512
    # Four tokens share a cell: the one global token in 1,500 must still mark its whole row and column.
    assert (cells[175] == Rule.GLOBAL).all()
    assert (cells[:, 175] == Rule.GLOBAL).all()
    # Where a cell holds several rules, the strongest is shown.
    assert Rule.GLOBAL > Rule.WINDOW > Rule.RANDOM > Rule.NONE


def test_every_layer_has_a_panel_with_its_own_blocks(tmp_path):
    config = small_config(attention_window=[4, 8, 8, 8, 8])
    figure = draw_layers(config, length=96, path=tmp_path / "layers.png")
    batch = one_row_batch(length=96, global_positions=(0,))
    panels = [drawn_cells(panel) for panel in figure.axes]
    for cells, pattern in zip(panels, config.attention_patterns(), strict=True):
        assert torch.equal(cells, edge_rules(pattern, batch))
    assert not torch.equal(panels[1], panels[2])
    assert figure.axes[0].get_title() == "layer 0: window 4, dilation 1"
    assert (tmp_path / "layers.png").exists()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_pattern(
            small_config(attention_dilation=11, num_hidden_layers=12, causal_attention=True, random_seed=99),
            length=3999,
            layer=11,
            head=11,
            padding=1000,
        ),
        lambda: draw_pattern(small_config(attention_dilation=3), length=240, padding=100),
        lambda: draw_layers(small_config(num_hidden_layers=1, attention_dilation=2), length=960),
        lambda: draw_layers(small_config(num_hidden_layers=2, attention_dilation=2), length=320),
        lambda: draw_attention_map(torch.rand(60, 60), tokens=["ACKNOWLEDGEMENT"] * 60),
        lambda: draw_attention_map(torch.rand(4, 8, 8), tokens=["ACKNOWLEDGEMENT"] * 8),
        draw_overview,
    ],
)
def test_all_text_fits_into_the_picture(draw):
    figure = draw()
    used = figure.get_tightbbox()
    assert used.x0 >= 0 and used.y0 >= 0
    assert used.x1 <= figure.get_figwidth() and used.y1 <= figure.get_figheight()


@pytest.mark.parametrize("shape", [(20, 20), (3, 20, 20)])
def test_attention_map_is_drawn_per_head(shape, tmp_path):
    weights = torch.rand(shape).masked_fill(torch.rand(shape) < 0.5, 0.0)
    tokens = [f"$tok_{n}^$" for n in range(20)]
    figure = draw_attention_map(weights, tokens=tokens, path=tmp_path / "map.png")
    *panels, bar = figure.axes
    assert len(panels) == (3 if len(shape) == 3 else 1)
    for panel, own in zip(panels, weights.view(-1, 20, 20), strict=True):
        assert torch.allclose(drawn_cells(panel), own)
        assert torch.equal(torch.as_tensor(panel.images[0].get_alpha()) > 0, own > 0)
        assert [label.get_text() for label in panel.get_yticklabels()] == tokens
    assert "attention weight" in bar.get_ylabel()
    assert (tmp_path / "map.png").exists()


def test_attention_map_of_one_head_and_of_many_tokens():
    weights = torch.softmax(torch.randn(2, 61, 61), dim=-1)
    panel, _ = draw_attention_map(weights, head=1, tokens=["x"] * 61).axes
    assert torch.equal(drawn_cells(panel), weights[1])
    assert panel.get_title() == "head 1"
    assert "x" not in [label.get_text() for label in panel.get_xticklabels()]


def test_long_maps_are_drawn_smaller_by_their_largest_weights():
    weights = torch.rand(1300, 1300)
    panel, _ = draw_attention_map(weights).axes
    assert torch.equal(drawn_cells(panel)[:2, 7], weights[:4, 14:16].reshape(2, 4).amax(1))
    assert panel.get_title() == "attention map (each dot: 2 x 2 tokens)"


def test_small_weights_stay_apart_on_the_scale():
    norm = draw_attention_map(torch.tensor([[0.9, 0.0], [0.002, 0.0002]])).axes[0].images[0].norm
    assert norm(0.9) == pytest.approx(1.0)
    assert norm(0.002) - norm(0.0002) > 0.2


def test_map_of_zeros_can_be_drawn(tmp_path):
    draw_attention_map(torch.zeros(2, 4, 4), path=tmp_path / "zeros.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length=0 must be between 1 and 4096"),
        ({"length": 5000}, "length=5000 must be between 1 and 4096"),
        ({"length": 9, "padding": 9}, "padding=9 must be between 0 and 8"),
        ({"length": 9, "padding": 2, "global_positions": (7,)}, "global position 7 is no real token.*0 to 6"),
        ({"length": 9, "document_ids": [0, 1]}, "document_ids has 2 values but length=9"),
        ({"length": 9, "layer": 5}, "layer=5 does not exist: there are 5"),
        ({"length": 9, "head": -1}, "head=-1 does not exist: there are 12"),
    ],
)
def test_impossible_patterns_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        draw_pattern(small_config(), **options)


@pytest.mark.parametrize(
    ("attention_map", "options", "message"),
    [
        (torch.ones(1, 2, 4, 4), {}, r"shape \(1, 2, 4, 4\).*attention_map\[0\]"),
        (torch.ones(4, 5), {}, r"shape \(4, 5\)"),
        (torch.full((4, 4), -2.0), {}, "contains -2.0.*probabilities"),
        (torch.full((4, 4), torch.nan), {}, "contains nan"),
        (torch.ones(4, 4), {"tokens": ["a"]}, "tokens has 1 labels but the map has 4"),
        (torch.ones(4, 4), {"head": 1}, "head=1 does not exist: there are 1"),
    ],
)
def test_impossible_maps_are_refused(attention_map, options, message):
    with pytest.raises(ValueError, match=message):
        draw_attention_map(attention_map, **options)


def test_overview_adds_up(tmp_path):
    panels = draw_overview(tmp_path / "overview.png").axes
    local, everywhere, random, together = (drawn_cells(panel) for panel in panels)
    assert torch.equal(torch.maximum(torch.maximum(local, everywhere), random), together)
    for cells, rule in ((local, Rule.WINDOW), (everywhere, Rule.GLOBAL), (random, Rule.RANDOM)):
        assert cells.unique().tolist() == [Rule.NONE, rule]
    assert (tmp_path / "overview.png").stat().st_size < 150_000


@pytest.mark.parametrize(
    "arguments",
    [
        "pattern --length 64 --window 8 --dilation 2 --random-blocks 1 --block-size 4 --seed 5 --layer 2 --head 3 "
        "--causal --global-positions 0 9 --padding 3 --documents 30 34",
        "layers --length 64 --window 8 --block-size 4 --layers 2 --global-positions",
        "overview",
    ],
)
def test_command_line_writes_its_picture(arguments, tmp_path, capsys):
    path = tmp_path / "picture.png"
    main([*arguments.split(), "--output", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {path}\n"


def test_command_line_passes_its_options_on(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(pictures, "draw_pattern", lambda config, **options: drawn.update(options, config=config))
    arguments = "--length 64 --window 8 --dilation 2 --random-blocks 1 --block-size 4 --seed 5 --layer 2 --causal"
    main(["pattern", *arguments.split(), "--documents", "3", "2", "--output", str(tmp_path / "x.png")])
    expected = small_config(
        num_hidden_layers=3, attention_dilation=2, num_random_blocks=1, random_seed=5, causal_attention=True
    )
    assert drawn["config"].attention_patterns() == expected.attention_patterns()
    assert drawn["layer"] == 2
    assert drawn["document_ids"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("arguments", ["--window 7", "--length 9999", "--layer -1"])
def test_command_line_says_what_is_wrong(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["pattern", *arguments.split(), "--output", str(tmp_path / "x.png")])
    assert stop.value.code == 2
    assert arguments.split()[1] in capsys.readouterr().err


@pytest.fixture
def no_matplotlib(monkeypatch):
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_missing_matplotlib_names_the_extra(no_matplotlib, tmp_path, capsys):
    remedy = 'pip install "hybrid-longformer[view]"'
    for draw in (
        lambda: draw_pattern(PLAIN, length=20),
        lambda: draw_layers(small_config(), length=20),
        lambda: draw_attention_map(torch.ones(4, 4)),
        draw_overview,
    ):
        with pytest.raises(ImportError) as error:
            draw()
        assert remedy in str(error.value)
    with pytest.raises(SystemExit):
        main(["overview", "--output", str(tmp_path / "x.png")])
    assert remedy in capsys.readouterr().err
    assert (edge_rules(PLAIN, one_row_batch(length=20)) == Rule.WINDOW).any()


def test_demo_checks_and_races(tmp_path, capsys):
    demo.main(["--folder", str(tmp_path), "--lengths", "128", "256"])
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "pattern.png").exists()
    assert any("fast output - dense output" in line for line in lines)
    assert sum(line.endswith("x") for line in lines) == 2


def test_demo_goes_on_without_matplotlib(no_matplotlib, tmp_path, capsys):
    demo.draw_default_pattern(tmp_path)
    assert 'pip install "hybrid-longformer[view]"' in capsys.readouterr().out


def test_demo_refuses_a_wrong_result(monkeypatch):
    attention = demo.build_attention()
    forward, wider = type(attention).forward, replace(attention.pattern, window=130)

    def sees_two_more(self, *args, **kwargs):
        if self.attn_implementation == "eager":
            self.pattern = wider
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(attention), "forward", sees_two_more)
    with torch.inference_mode(), pytest.raises(SystemExit, match="more than the 1e-05 of rounding"):
        demo.check_against_dense(attention, length=600)
