#!/bin/bash
set -x
MODEL=OpenRLHF/Llama-3-8b-sft-mixture
export SAVE_PATH="./checkpoint/llama3-8b-rlhf"

ray job submit --address="http://127.0.0.1:8265" \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path $MODEL \
   --reward.remote_url reward_func.py \
   --critic.adam.lr 9e-6 \
   --actor.adam.lr 5e-7 \
   --algo.advantage.estimator gae \
   --algo.advantage.lambd 0.95 \
   --algo.kl.init_coef 0.02 \
   --data.prompt_dataset prompts.jsonl \
   --data.input_key prompt \
   --data.label_key solution \
   --data.apply_chat_template \
   --data.max_len 256 \
   --rollout.max_new_tokens 64 \
   --rollout.batch_size 4 \
   --rollout.n_samples_per_prompt 2 \
   --train.batch_size 4 \
   --train.micro_batch_size 2 \
   --train.num_episodes 2 \
   --actor.eps_clip_low_high 0.2 0.27 \
   --reward.clip_range -5 5 \
   --reward.overlong_buffer_len 16 \
   --actor.gradient_checkpointing_enable \
   --ds.zero_stage 3 \
   --ds.param_dtype bf16 \
   --ds.packing_samples \
   --vllm.num_engines 2 \
   --vllm.sync_backend nccl \
   --train.colocate_all \
   --ckpt.output_dir $SAVE_PATH \
   --logger.wandb.key $WANDB_TOKEN \
   --train.seed $RANDOM
