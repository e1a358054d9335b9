#!/bin/sh
# Takes a team's project to the home that all parts share, where the next run finds it. Standard input is a
# git bundle of its branch, `main` if no other is named; the commit that was there before is replaced:
#   git bundle create - main | ... infra/images/take-project.sh [BRANCH]
set -eu

branch=${1:-main}
project=$PENSTOCK_HOME/project
bundle=$(mktemp)
trap 'rm "$bundle"' EXIT
cat >"$bundle"
if [ -e "$project/.git" ]; then
    git -C "$project" fetch --quiet "$bundle" "$branch"
    git -C "$project" reset --quiet --hard FETCH_HEAD
else
    git clone --quiet --branch "$branch" "$bundle" "$project"
fi
echo "project: $branch is $(git -C "$project" rev-parse HEAD)"
