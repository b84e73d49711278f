"""`stage` into a folder that several nodes share."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_stage import env, walked_index

from mpitrain.stage import copies
from mpitrain.stage.copies import NodeCopy
from mpitrain.stage.stream import Source

__all__ = ["env"]  # a fixture


@pytest.mark.parametrize("is_at_once", [True, False])
def test_nodes_that_share_a_folder_have_a_copy_each(
    env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_at_once: bool
) -> None:
    index, source = walked_index(env), Source(walked_index(env))
    stream: list[bytearray] = []
    for number, size in enumerate(index.sizes):
        stream.append(bytearray(size))
        source.read(number, stream[-1])
    nodes: dict[str, NodeCopy] = {}
    (tmp_path / "to").mkdir()

    def of_node(boot: str) -> NodeCopy:
        monkeypatch.setattr(copies, "boot_id", lambda: boot)
        if boot not in nodes:
            nodes[boot] = NodeCopy(index, str(tmp_path / "to"), "", rewrites=True)
        return nodes[boot]

    def finish(boot: str) -> None:
        for number, piece in enumerate(stream):
            of_node(boot).write(number, piece)
        of_node(boot).finish("", of_node(boot).crc)

    for boot in ("one", "two", "three"):
        assert of_node(boot).prepare()
        if not is_at_once:
            finish(boot)
    for boot in nodes if is_at_once else ():
        finish(boot)
    assert [it.error for it in nodes.values()] == [""] * 3
    first, *others = (it.folder for it in nodes.values())
    assert [it[: len(first)] for it in others] == [first] * 2
    assert len({first, *others}) == 3
    for copy in nodes.values():
        there = copy.paths[str(env)]
        assert there.startswith(f"{copy.folder}/")
        assert Path(there, "pyvenv.cfg").read_text().startswith(f"home = {there}/")
    for boot, before in [*nodes.items()]:  # the next job of each
        del nodes[boot]
        assert not of_node(boot).prepare()
        assert (of_node(boot).had_it, of_node(boot).paths) == (True, before.paths)
