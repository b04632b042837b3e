#!/bin/bash
# Fail where a server would refuse an adapter: check_adapters.sh DIRECTORY...
# Looks at every directory below that has an adapter_config.json. BASE_MODEL and MAX_LORA_RANK, where they are set, are
# the server's; neither vLLM nor a GPU is needed. Needs lora-plugins and jq.
set -euo pipefail
looked_at=0 refused=0
while IFS= read -r config; do
    adapter=$(dirname "$config")
    report=$(lora-plugins inspect "$adapter" --json) || true # exits with 1 for a refused adapter, with 7 for a whole one
    verdict=$(jq -r --arg base "${BASE_MODEL:-}" --argjson rank "${MAX_LORA_RANK:-0}" '
        .adapters[0] | if .error then .error.message
        elif $base != "" and .config.base_model != $base then "is for \(.config.base_model), not for \($base)"
        elif $rank > 0 and .config.max_rank > $rank then "has rank \(.config.max_rank), the server takes \($rank)"
        else "ok" end' <<<"$report")
    echo "$adapter: $verdict"
    looked_at=$((looked_at + 1))
    [ "$verdict" = ok ] || refused=$((refused + 1))
done < <(find "$@" -name adapter_config.json | sort)
echo "$looked_at adapters, $refused refused"
[ "$looked_at" -gt 0 ] && [ "$refused" -eq 0 ]
