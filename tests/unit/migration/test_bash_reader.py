"""The reader of bash scripts gives the words that bash gives, and never runs anything."""

import subprocess

import pytest

from megatron_grpo.migration.bash import read_bash
from megatron_grpo.utils.errors import GrpoError

# Each ends in a command `show ...`; bash itself says what its words are.
SCRIPTS = {
    "quotes and continuations": 'show a \'b c\' "d \\"e\\"" \\\n    f\\ g # comment\n',
    "defaults": 'A=1; B=${A:-2} C=${NONE:-x y}\nshow $A ${B} "$C" ${EMPTY-} $C z\n',
    "nested defaults": 'HOME_DIR=/data; P=${P_NOT_SET:-"${HOME_DIR}/models/$((1 + 1))"}\nshow $P\n',
    "arithmetic": "a=2 b=3\nshow $((a * 1024 + $b)) $(( (a + b) * 2 )) $((7 / 2)) $((-a))\n",
    "arrays": 'NO=()\nARGS=(\n  --one 1 # first\n  # --two 2\n  "three four"\n)\nARGS+=(--five)\n'
    'show "${ARGS[@]}" "${NO[@]}" ${ARGS[@]}\n',
    "here-documents": "cat <<EOF >/dev/null\nshow not this\nEOF\nshow this 2>&1 | cat\n",
    "appended text": "A=x; A+=y\nshow $A'z'\"w\"\n",
    "prefixes": "export A=1 B='2 3'\nshow $A \"$B\" key=[1,2]\n",
    "options of prefixes": "declare -a A=(--x 1 'y z')\ndeclare -i N=6\nexport -- B=2\nreadonly -a C=(3)\n"
    'show "${A[@]}" $N $B "${C[@]}" A=1\n',
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPTS[name])
    shown = 'show() { printf "%s\\0" "$@"; }\n' + SCRIPTS[name]
    expected = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout
    words = next(words for _, words in reversed(read_bash(path).commands) if words[0] == "show")
    assert words[1:] == expected.split("\0")[:-1]


def test_what_only_a_run_can_tell_stays(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("show ${MODEL_PATH}/x $(touch made) `touch made` $((NODES * 2))\n")
    words = read_bash(path).commands[0][1]
    assert words == ["show", "${MODEL_PATH}/x", "$(touch made)", "`touch made`", "$((NODES * 2))"]
    assert not (tmp_path / "made").exists()


def plain(script, branch=0):
    """Return the words of the last command, with the values of a branch."""
    return [text for word in script.commands[-1][1] if (text := script.text(word, branch))]


# Values of $1 for which bash takes each branch, by script; the first is the branch whose values come first.
CONDITIONS = {
    'if [ "$1" = a ]; then N=1; else N=2; fi\nshow "$N"\n': "a b",
    'N=0\nif [ "$1" = a ]; then N=1\nelif [ "$1" = b ]; then N=2\nfi\nshow n=$N\n': "c a b",
    "N=\ncase $1 in\n a | b) N=${N:-1} ;;\n (c) N=${N:-2};; esac\nshow $N\n": "a c",
    'case "$1" in a) N=1 ;; *) N=2\nesac\nshow $N $((N * 10))\n': "x a",
    'N=\ncase $1 in a) case $2 in "") N=1;; *) N=7;; esac;; b) N=3;; *) exit 1;; esac\nM=$N\nshow "$M"\n': "",
    'A=(x)\nif [ "$1" = a ]; then\n A+=(--y "1 2")\nfi\nshow "${A[@]}" z\n': "b a",
    'N=0\n[ "$1" = a ] && N=1\nshow $N\n': "b a",
    'F="--u 1"\nif [ "$1" = a ]; then F="--u 1 --v 2"; fi\nshow $F\n': "b",
    "for i in 1 2; do N=4; done\nN=5\nshow $N\n": "a",
}


@pytest.mark.parametrize("text", CONDITIONS)
def test_every_branch_gives_the_words_of_bash(text, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(text)
    script = read_bash(path)
    shown = 'show() { printf "%s\\0" show "$@"; }\n' + text
    for branch, argument in enumerate(CONDITIONS[text].split()):
        expected = subprocess.run(
            ["bash", "-c", shown, "_", argument], capture_output=True, text=True, check=True
        ).stdout
        assert plain(script, branch) == expected.split("\0")[:-1]


def test_values_of_nested_conditions_are_all_known(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "N=\ncase $D in\n gpu) case $M in gb) N=${N:-4};; *) N=${N:-8};; esac ;;\n npu) N=16;;\n"
        " *) echo no; exit 1;;\nesac\nT=$N\nshow $T\n"
    )
    script = read_bash(path)
    assert [plain(script, branch)[1] for branch in range(3)] == ["8", "4", "16"]
    assert script.branches(script.commands[-1][1]) == 3


def test_the_first_branch_holds_and_is_noted(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text('N=8\nif [ "$X" = 1 ]; then\n  N=4\n  M=1\nelse\n  M=2\nfi\nshow $N $M\n')
    script = read_bash(path)
    assert plain(script) == ["show", "8", "1"]
    assert script.notes == ["run.sh has conditions, which are not evaluated: check the values that they set"]


def test_sourced_files_are_read_beside_the_script(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("MODEL=(--num-layers 2)\n")
    path = tmp_path / "run.sh"
    path.write_text(
        'DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$DIR/models/tiny.sh"\nshow ${MODEL[@]}\n'
    )
    assert read_bash(path).commands[-1][1] == ["show", "--num-layers", "2"]
    path.write_text("source absent.sh\n")
    assert read_bash(path).notes == ["source absent.sh: there is no such file, so its variables are missing"]


def test_an_unfinished_script_is_refused_with_its_line(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("A=1\nshow 'no end\n")
    with pytest.raises(GrpoError, match=r"run\.sh:2: a quote without its end"):
        read_bash(path)
