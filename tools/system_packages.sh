#!/usr/bin/env bash
# What pip cannot bring: a C++20 compiler, Python headers, the doctest header. Installs them where it may,
# names them where it may not.
set -euo pipefail

python=${PYTHON:-python3}
needed=()
command -v g++ >/dev/null || needed+=(g++)
command -v make >/dev/null || needed+=(make)
test -f /usr/include/doctest/doctest.h || needed+=(doctest-dev)

if [ ${#needed[@]} -eq 0 ]; then exit 0; fi
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "installing system packages: ${needed[*]}"
  apt-get install -y -qq "${needed[@]}" >/dev/null 2>&1 ||
    { apt-get update -qq >/dev/null && apt-get install -y -qq "${needed[@]}" >/dev/null; }
else
  echo "kvstore needs these system packages: ${needed[*]}" >&2
  echo "  sudo apt-get install ${needed[*]}" >&2
  exit 1
fi
