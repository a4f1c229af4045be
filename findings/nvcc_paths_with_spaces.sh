#!/usr/bin/env bash
# nvcc 13.0.88 and 13.5.37 below a path with a space. nvcc takes its own arguments as they are, but writes the value of
# -Xcompiler into a line for a shell without quoting it: -Xcompiler=-fmacro-prefix-map=/my work/=/ becomes two words, of
# which gcc takes the second for a file. The value has to be quoted twice, as in -Xcompiler="'-f…=/my work/=/'". nvcc also
# splits the value at commas that have no backslash before them. The files of dependencies that -MD writes name the
# sources with a backslash before each space, and the target without one.
# The script prints what nvcc would run and has written, and exits with 1 if that has changed. It needs g++.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/my work"
cd "$folder/my work"
echo "void f() {}" > kernel.cu
has_changed=0
for version in 13.0.88 13.5.37; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --no-deps "nvidia-cuda-nvcc==$version" "nvidia-nvvm==$version" \
        "nvidia-cuda-crt==$version" "nvidia-cuda-runtime"
    nvcc=$(echo "$folder/$version"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
    "$nvcc" --version | grep release
    flag="-fmacro-prefix-map=$PWD/=/"
    for value in "$flag" "'$flag'" "-Wp,-DX" '-Wp\,-DX'; do
        "$nvcc" --dryrun -Xcompiler="$value" -c kernel.cu -o kernel.o 2> commands
        line=$(sed -n 's/^#\$ \(gcc .*-E .*\)/\1/p' commands | head -1)
        bash -c "set -- $line; printf '%s\n' \"\$@\"" > words  # what the shell makes of the line
        echo "-Xcompiler=$value -> $(grep -E 'fmacro-prefix|work/=|-Wp|^-DX' words | tr '\n' '|')"
        case "$value" in
            "$flag" | "-Wp,-DX") grep -qxF -- "${value//\\/}" words && has_changed=1 ;;
            "'$flag'") grep -qxF -- "$flag" words || has_changed=1 ;;
            *) grep -qxF -- "-Wp,-DX" words || has_changed=1 ;;
        esac
    done
    "$nvcc" -MD -MF "the words.d" -c kernel.cu -o "the kernel.o" 2> /dev/null || true
    if [ -s "the words.d" ]; then
        head -1 "the words.d"
        grep -q '^the kernel.o *:' "the words.d" || has_changed=1
    fi
done
exit $has_changed
