#!/usr/bin/env bash
# ./dev docs: what the documents claim about files.
#   - every relative link of a *.md leads to a file of the project, every #anchor to a heading
#   - a code block under `<!-- file: PATH -->` stands, line for line, in that file
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mapfile -t documents < <(git ls-files --cached --others --exclude-standard -- '*.md')
wrong=0 links=0 quotes=0
complain() {
  echo "$1" >&2
  wrong=$((wrong + 1))
}

# The text without fenced blocks and inline code.
prose() { awk '/^ *(```|~~~)/ { fenced = !fenced; next } !fenced { gsub(/`[^`]*`/, ""); print }' "$1"; }

# The anchors of a document's headings, as GitHub makes them.
anchors() {
  awk '/^ *(```|~~~)/ { fenced = !fenced; next } !fenced && /^#+ / { sub(/^#+ +/, ""); print tolower($0) }' "$1" |
    sed -E 's/\[([^]]*)\]\([^)]*\)/\1/g; s/[^a-z0-9 _-]//g; s/ /-/g'
}

for document in "${documents[@]}"; do
  folder=$(dirname "$document")
  while IFS= read -r target; do
    case $target in
      '' | http://* | https://* | mailto:*) continue ;;
    esac
    links=$((links + 1))
    path=${target%%#*} anchor=
    [[ $target != *'#'* ]] || anchor=${target#*#}
    file=$document
    [[ -z $path ]] || file=$folder/$path
    if [[ ! -e $file ]]; then
      complain "$document: the link to '$target' leads nowhere"
    elif [[ -n $anchor && $file == *.md ]] && ! anchors "$file" | grep -qxF -- "$anchor"; then
      complain "$document: '$target' names no heading of $file"
    fi
  done < <(prose "$document" | grep -oE '\]\([^) ]+' | sed 's/^](//')

  while IFS= read -r quoted; do
    quotes=$((quotes + 1))
    block=$(awk -v mark="<!-- file: $quoted -->" '
      $0 == mark { armed = 1; next }
      armed && /^```/ { if (inside) exit; inside = 1; next }
      inside { print }' "$document")
    if [[ ! -f $quoted ]]; then
      complain "$document: quotes $quoted, which does not exist"
    elif [[ -z $block || $'\n'$(<"$quoted")$'\n' != *$'\n'"$block"$'\n'* ]]; then
      complain "$document: the block under 'file: $quoted' is not what the file says"
    fi
  done < <(sed -n 's/^<!-- file: \(.*\) -->$/\1/p' "$document")
done

((!wrong)) || exit 1
echo "${#documents[@]} documents, $links links, $quotes quoted files: all right"
