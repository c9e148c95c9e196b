set -x

read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --model.model_name_or_path meta-llama/Meta-Llama-3-8B \
   --ckpt.output_dir ./checkpoint/llama3-8b-dpo \
   --train.batch_size 256 \
   --model.beta 0.1 \
   --model.nll_loss_coef 0.2 \
   --adam.lr 5e-7 \
   --lr_warmup_ratio 0.05 \
   --data.dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku \
   --data.chosen_key chosen_messages \
   --data.rejected_key rejected_messages \
   --data.max_samples 1000 \
   --ds.lora.rank 16 \
   --ds.load_in_4bit \
   --train.max_epochs 1
EOF

deepspeed --module $training_commands
