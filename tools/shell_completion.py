"""Print a script for bash or zsh that completes the flags of pretrain_grpo.py, their choices and their files.

    python tools/shell_completion.py bash >~/.grpo_completion && source ~/.grpo_completion

The script completes the words after pretrain_grpo.py, whether torchrun or python starts it. It holds the flags of
megatron_grpo/training/flags.json and starts no Python. Flags of plug-ins are not in it.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_grpo.training.command_line import TABLE
from megatron_grpo.utils.flags import PATH

# Completion by files ("-o default") applies before the program's name, and to the value of any other flag.
FUNCTION = """\
_pretrain_grpo_flags={flags}
_pretrain_grpo_paths={paths}
_pretrain_grpo() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} i flag= program= choices=
    COMPREPLY=()
    for ((i = 0; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            pretrain_grpo.py | */pretrain_grpo.py) program=1 flag= ;;
            --*) flag=${{COMP_WORDS[i]//_/-}} ;;
        esac
    done
    [[ -n $program ]] || return 0
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$_pretrain_grpo_flags" -- "${{word//_/-}}"))
        return
    fi
    case $flag in
{choices}
    esac
    if [[ -n $choices ]]; then
        COMPREPLY=($(compgen -W "$choices" -- "$word"))
    elif [[ " $_pretrain_grpo_paths " != *" $flag "* ]]; then
        compopt +o default 2>/dev/null # the value is no file
    fi
}}
complete -o default -F _pretrain_grpo torchrun python python3 pretrain_grpo.py
"""
ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def script(shell: str) -> str:
    """Return the script for "bash", or for "zsh", which runs that of bash."""
    rows = json.loads(TABLE.read_text())["flags"]
    flags = ["--help", "--help-all", *(name for row in rows for name in row["options"])]
    paths = [name for row in rows if row.get("kind") in (PATH, [PATH]) for name in row["options"]]
    choices = [
        f"        {name}) choices={shlex.quote(' '.join(row['choices']))} ;;"
        for row in rows
        if row.get("choices")
        for name in row["options"]
    ]
    text = FUNCTION.format(
        flags=shlex.quote(" ".join(flags)), paths=shlex.quote(" ".join(paths)), choices="\n".join(choices)
    )
    return (ZSH if shell == "zsh" else "") + text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads the script")
    print(script(parser.parse_args().shell), end="")


if __name__ == "__main__":
    main()
