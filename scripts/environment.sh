# Sourced by the scripts beside it: a virtual environment in .venv with the packages of one requirements file.
#   make_environment requirements.txt      sets PYTHON
# An environment that has these very requirements is used as it is. FACE_VENV names another folder for it.

make_environment() {
    local requirements="$1" venv="${FACE_VENV:-.venv}" wanted base="${PYTHON:-python3}"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        { echo "error: Python 3.10 or newer is needed, $base is $("$base" --version 2>&1)" >&2; return 1; }
    [ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
    PYTHON="$venv/bin/python"
    wanted="$(cat requirements.txt "$requirements" | cksum)"
    if [ "$(cat "$venv/installed-$requirements" 2>/dev/null)" != "$wanted" ]; then
        echo "installing $requirements into $venv"
        # torch first: the others then find the build that is there
        "$PYTHON" -m pip install --disable-pip-version-check "$(grep '^torch==' requirements.txt)"
        "$PYTHON" -m pip install --disable-pip-version-check -r "$requirements"
        echo "$wanted" > "$venv/installed-$requirements"
    fi
}
