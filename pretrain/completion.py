"""Shell completion: the words that may follow, answered by Hydra's own completion.

The shell runs `shardwright completion SHELL --query` with the line so far in `COMP_LINE`, as bash does for its own
programs. Commands and options are ours; groups, choices, keys and their present values are Hydra's.
"""

from collections.abc import Iterable

import hydra
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from shardwright.conf.compose import CONFIG_FOLDER, CONFIG_NAME

OPTIONS = {
    "train": ("--cfg", "--dry-run", "--help", "--multirun"),
    "plan": ("--cfg", "--help", "--json"),
    "submit": ("--dry-run", "--help", "--multirun", "--now"),
    "explain": ("--help", "--json"),
    "bench": ("--against", "--help", "--json", "--steps", "--warmup"),
    "checkpoint": ("--help", "--json", "--step"),
    "completion": ("bash", "fish", "zsh"),
}
FIRST_WORDS = {"bench": ("step",), "checkpoint": ("export", "import", "inspect", "list", "verify")}
"""What must follow a command."""
SCRIPTS = {
    "bash": """\
_shardwright() {
    local word="${COMP_WORDS[COMP_CWORD]}"
    local answer="$(COMP_LINE="${COMP_LINE:0:$COMP_POINT}" shardwright completion bash --query 2>/dev/null)"
    COMPREPLY=($(compgen -W "$answer" -- "$word"))
    [[ "${COMPREPLY[0]}" == *[=./] ]] || compopt +o nospace
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _shardwright shardwright""",
    "zsh": """\
_shardwright() {
    local -a answers
    answers=("${(@f)$(COMP_LINE="${(j: :)words[1,CURRENT]}" shardwright completion zsh --query 2>/dev/null)}")
    compadd -S '' -- $answers
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _shardwright shardwright""",
    "fish": """\
function __shardwright
    COMP_LINE=(commandline -cp) shardwright completion fish --query 2>/dev/null
end
complete -c shardwright -f -a '(__shardwright)'""",
}
"""What each shell evaluates."""


def script(shell: str) -> str:
    """The completion script of `shell`: bash, zsh or fish."""
    return SCRIPTS[shell]


def complete(line: str, commands: Iterable[str]) -> list[str]:
    """Words that can stand where `line` ends; `line` begins with the program's name."""
    words = line.split()[1:]
    if line[-1:].isspace() or not words:
        words.append("")
    if len(words) == 1:
        return [command for command in commands if command.startswith(words[0])]
    command, *before, word = words
    options = [option for option in OPTIONS.get(command, ()) if option.startswith(word)]
    if command == "completion" or (word.startswith("-") and options):
        return options
    if command in FIRST_WORDS and not before:
        return [first for first in FIRST_WORDS[command] if first.startswith(word)]
    if command == "checkpoint":
        return []  # the shell completes paths
    overrides = [earlier for earlier in before if "=" in earlier and not earlier.startswith("-")]
    return _from_hydra([*overrides, word])


def _from_hydra(words: list[str]) -> list[str]:
    """Hydra's answer for the last of `words`, without its own settings."""
    try:
        with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            found = BashCompletion(loader)._query(config_name=CONFIG_NAME, line=" ".join(words))
    except (HydraException, OmegaConfBaseException):
        return []  # an earlier word is wrong; the command will say so
    return [answer for answer in found if not answer.startswith("hydra")]
