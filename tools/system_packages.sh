#!/usr/bin/env bash
# What pip cannot bring. Installs it where it may (root on Debian), names it where it may not.
#
#   system_packages.sh build PYTHON   Python 3.11-3.13 with venv and headers, a C++20 compiler
#   system_packages.sh test PYTHON    the same, and the doctest header
#   system_packages.sh peers PYTHON   the same as build, and redis-server for bench.local --peers
#   system_packages.sh nvme PYTHON    the same as build, and fio for bench.nvme
set -euo pipefail

what=$1 python=$2
needed=()
if [ -z "$python" ]; then
  needed+=(python3 python3-venv python3-dev)
else
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip, venv' 2>/dev/null || needed+=("python$version-venv")
  "$python" - 2>/dev/null <<'PY' || needed+=("python$version-dev")
import pathlib, sysconfig
raise SystemExit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file())
PY
fi
command -v g++ >/dev/null || needed+=(g++)
if [ "$what" = test ]; then
  [ -f /usr/include/doctest/doctest.h ] || needed+=(doctest-dev)
fi
if [ "$what" = peers ]; then
  command -v redis-server >/dev/null || needed+=(redis-server)
fi
if [ "$what" = nvme ]; then
  command -v fio >/dev/null || needed+=(fio)
fi
[ ${#needed[@]} -gt 0 ] || exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "installing system packages: ${needed[*]}"
  apt-get install -y -qq "${needed[@]}" >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null && apt-get install -y -qq "${needed[@]}" >/dev/null; }
  if [ -z "$python" ]; then
    echo "Python was just installed: run make again" >&2
    exit 1
  fi
else
  echo "kvstore needs these system packages: ${needed[*]}" >&2
  echo "  sudo apt-get install ${needed[*]}" >&2
  exit 1
fi
