"""The command ``python -m visdet.compat``, which lists the bridges or runs a program with them."""

import re
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

from visdet.checks.installed import installed_version
from visdet.compat import BRIDGES, names_in
from visdet.compat._run import STARTUP, become
from visdet.compat.extensions import NAMES

_OPERATOR = re.compile(
    r"^(?:class MultiScaleDeformableAttention|def multi_scale_deformable_attention(?:_v2)?)\b", re.M
)
_REPLACED = {
    "ultralytics": "MSDeformAttn of RT-DETR",
    "rtdetr": "deformable_attention_core_func of the sources of RT-DETR, D-FINE and DEIM",
    "rfdetr": "MSDeformAttn",
    "groundingdino": "multi_scale_deformable_attn_pytorch; groundingdino._C where it is missing",
    "libreyolo": "the kernel slot ms_deform_attn",
    "extensions": ", ".join(NAMES),
    "older_versions": "what Python, numpy, torch, torchvision, Pillow, matplotlib and shapely have dropped, and "
    "checkpoints with numpy",
}
_OF_NO_PACKAGE = ("rtdetr", "extensions", "older_versions")
_USAGE = """usage: python -m visdet.compat                                              list the bridges
       python -m visdet.compat run [--only NAMES] SCRIPT|-m MODULE [ARGUMENTS]  run a program with them
       python -m visdet.compat.mmcv_ops SCRIPT|-m MODULE [ARGUMENTS]            the same with --only extensions
       python -m visdet.compat startup                                      print the folder for PYTHONPATH"""
_DISTRIBUTIONS = {"groundingdino": ("groundingdino-py", "rf-groundingdino", "groundingdino")}


def families() -> list[str]:
    """Return the families of the installed ``transformers`` whose sources define the operator."""
    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    sources = (path for folder in folders or () for path in Path(folder).glob("models/*/modeling_*.py"))
    return sorted(
        {path.parent.name for path in sources if _OPERATOR.search(path.read_text(encoding="utf-8"))}
    )


def version_of(name: str) -> str | None:
    """Return the installed version of a bridge's package, or None if the package is not installed."""
    versions = map(installed_version, _DISTRIBUTIONS.get(name, (name,)))
    return next(filter(None, versions), None)


def print_bridges() -> None:
    """Print a table of the bridges, and the commands that run a program with them."""
    from visdet.ops import build_info

    for name, state in build_info().items():
        print(
            f"visdet's {name} operators: {'ready' if state['loaded'] else 'not loaded: ' + state['problem']}"
        )
    print()
    for name in BRIDGES:
        version = "-" if name in _OF_NO_PACKAGE else version_of(name) or "not installed"
        replaced = ", ".join(families()) or "-" if name == "transformers" else _REPLACED[name]
        print(textwrap.fill(f"{name:15}{version:15}{replaced}", 120, subsequent_indent=" " * 30))
    mmcv = version_of("mmcv-lite") or "not installed"
    print(f"{'mmcv-lite':15}{mmcv:15}mmcv._ext, by the bridge extensions")
    print(
        "\nRun a script with all bridges:     python -m visdet.compat run SCRIPT|-m MODULE [ARGUMENTS]"
        "\nRun a script with some bridges:    python -m visdet.compat run --only transformers,extensions SCRIPT"
        "\nRun a script with torchrun:        torchrun --nproc-per-node 8 -m visdet.compat run SCRIPT"
        "\nInstall a bridge in a program:     import visdet.compat.transformers; visdet.compat.transformers.install()"
        "\nInstall bridges in every Python:   "
        'PYTHONPATH="$(python -m visdet.compat startup)${PYTHONPATH:+:$PYTHONPATH}" VISDET_COMPAT=transformers COMMAND'
    )


def main(arguments: list[str] | None = None) -> int:
    """List the bridges, become a program that has them, or print the folder for PYTHONPATH.

    Args:
        arguments: the arguments of the command. The default is those of this process.

    Returns:
        the exit status, which is 2 if the arguments are wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # torch.distributed.launch puts its argument behind the module, where it would be visdet's.
    rank = [given.pop(0)] if given and given[0].startswith("--local-rank=") else []
    names = "all"
    match given:
        case []:
            print_bridges()
            return 0
        case ["startup"]:
            print(STARTUP)
            return 0
        case ["run", "--only"]:
            names = ""
        case ["run", "--only", names, *program]:
            given = ["run", *program]
    chosen = names_in(names)
    is_known = chosen and {*BRIDGES, "all"}.issuperset(chosen)
    match given:
        case ["-h" | "--help", *_] | [_, "-h" | "--help", *_]:
            print(_USAGE)
            return 0
        case ["run", *_] if not is_known:
            print(f"--only must be names from {','.join(BRIDGES)}, got {names!r}", file=sys.stderr)
        case ["run", "-m", module, *program]:
            become(chosen, ["-m", module, *rank, *program])
        case ["run", script, *program] if script != "-m":
            become(chosen, [script, *rank, *program])
    print(_USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
