# Sourced by compose.yaml's containers: `. /gpus.sh actor|rollout|judge` sets CUDA_VISIBLE_DEVICES, and SHARE to its count.
# The rule of clawstream/local/servers/sglang_servers.py, in bash because SGLang's image has no clawstream; tests/parts/deploy compares the two.

refuse() {
  echo "$1. Nothing was started" >&2
  exit 2
}

half=$((NUM_GPUS < 2 ? 1 : NUM_GPUS / 2)) quarter=$((NUM_GPUS < 4 ? 1 : NUM_GPUS / 4))
actor=${ACTOR_GPUS:-$half} rollout=${ROLLOUT_GPUS:-$quarter}
left=$((NUM_GPUS - actor - rollout))
judge=${PRM_GPUS:-$((left < 0 ? 0 : left < quarter ? left : quarter))}
wanted=$((actor + rollout + judge))

((wanted <= NUM_GPUS)) || refuse "ACTOR_GPUS + ROLLOUT_GPUS + PRM_GPUS is $actor + $rollout + $judge = $wanted; NUM_GPUS is $NUM_GPUS. \
Lower one (PRM_GPUS=0: judges elsewhere, by JUDGE_URL)"

case $1 in
  actor) first=0 SHARE=$actor ;;
  rollout) first=$actor SHARE=$rollout ;;
  judge)
    first=$((actor + rollout)) SHARE=$judge
    ((judge % PRM_TP == 0)) || refuse "PRM_GPUS is $judge and PRM_TP is $PRM_TP, which does not divide it"
    ;;
  *) refuse "gpus.sh: no role $1" ;;
esac
((SHARE > 0)) || refuse "no GPU of $NUM_GPUS is left for the $1: raise its share, or for the judge leave COMPOSE_PROFILES=judge out"
export CUDA_VISIBLE_DEVICES=$(seq -s, $first $((first + SHARE - 1)))
