#!/bin/bash
# MNN 3.6.1: the converter mnnconvert runs `pip install -U aliyun-log-python-sdk` when it starts, without asking, if that
# package is not there. With it, MNN/tools/utils/log.py sends a record of each conversion to a server: the arguments with
# the names of the files, the sizes of both models, and a number of the machine. The C++ part, `_tools.mnnconvert`, does
# neither, and can be called from Python for models that are not public and in environments that are pinned.
# Here, a program that only writes down its arguments stands in the place of pip, so that nothing is installed or sent.
# Seen with MNN 3.6.1, numpy 2.2.6 and Python 3.11, 29 November 2026.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --no-deps MNN==3.6.1 numpy==2.2.6
mkdir "$folder/first"
printf '#!/bin/bash\necho "pip $*" >>"%s"\n' "$folder/calls" >"$folder/first/pip"
chmod +x "$folder/first/pip"
PATH="$folder/first:$PATH" "$folder/venv/bin/mnnconvert" --help >"$folder/said" 2>&1 || true
cat "$folder/calls"
grep -q "pip install -U aliyun-log-python-sdk" "$folder/calls"
