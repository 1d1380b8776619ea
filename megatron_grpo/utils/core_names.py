"""Names of megatron-core's fields as flags, fields without a flag, and flags without an effect."""

# Flags that Megatron-LM names differently from the field. Fields with the same flag all get its value.
RENAMED = {
    "num_moe_experts": "--num-experts",
    "gated_linear_unit": "--swiglu",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "fp8": "--fp8-format",
    "fp8_param": "--fp8-param-gather",
    "fp4": "--fp4-format",
    "fp4_param": "--fp4-param-gather",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "check_for_nan_in_grad": "--check-for-nan-in-loss-and-grad",
    "bucket_size": "--ddp-bucket-size",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
    "average_in_collective": "--ddp-average-in-collective",
    "nccl_ub": "--use-nccl-ub",
}

# Megatron-LM's names of flags that switch a field off, in addition to --no-<flag>.
SWITCHED_OFF_BY = {
    "add_bias_linear": ("--disable-bias-linear",),
    "perform_initialization": ("--no-initialization",),
    "bias_activation_fusion": ("--no-bias-swiglu-fusion", "--no-bias-gelu-fusion"),
    "apply_rope_fusion": ("--no-rope-fusion",),
    "overlap_p2p_comm": ("--no-overlap-p2p-communication",),
    "grad_reduce_in_fp32": ("--grad-reduce-in-bf16",),
}

# Fields without a flag.
EXCLUDED = {
    field: reason
    for reason, fields in {
        "a function or an object, which no flag can give": (
            "timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func no_sync_func "
            "grad_sync_func param_sync_func init_method output_layer_init_method embedding_init_method "
            "_cpu_offloading_context quant_recipe"
        ),
        "set by --swiglu, --quick-geglu and --squared-relu": "activation_func use_fused_weighted_squared_relu",
        "set by --bf16 and --fp16": "params_dtype pipeline_dtype autocast_dtype enable_autocast",
        "set by the pipeline: packs differ in length, and sent tensors are freed": (
            "variable_seq_lengths deallocate_pipeline_outputs mtp_standalone"
        ),
        "the opposite of --overlap-p2p-comm": "batch_p2p_comm",
        "per-token weights over the whole update normalise the loss": "calculate_per_token_loss",
        "the log-probability head replaces megatron-core's output layer and loss": (
            "cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute wgrad_deferral_limit "
            "fp8_output_proj"
        ),
        "the attention kernels compute the softmax in float32": (
            "attention_softmax_in_fp32 masked_softmax_fusion apply_query_key_layer_scaling"
        ),
        "with --bf16 or --fp16 the linear layers refuse its float32 input, and without them it changes nothing": (
            "fp32_residual_connection"
        ),
        "Transformer Engine 2.11, with which the tests ran, ignores it: use --attention-backend": (
            "flash_attention_version"
        ),
        "the norms are torch's or Transformer Engine's, not apex's": ("persist_layer_norm memory_efficient_layer_norm"),
        "only the input norm of latent attention would read it; the other norms are fused into projections, or add the "
        "gradient of the residual connection in their own kernel": "fused_residual_rmsnorm",
        "import, export and weight sync know two down-projections of latent attention, not one": (
            "mla_down_proj_fusion"
        ),
        "set by --rotary-base and --rotary-percent, for every model": "rotary_base rotary_percent",
        "it sets initial weights and learning rates of a model trained from scratch, and scales embeddings and logits, "
        "which the engine does not": (
            "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
            "mup_attn_scale_power"
        ),
        "Hugging Face directories have weights for each multi-token-prediction layer": "mtp_use_repeated_layer",
        "the input of multi-token-prediction layers is always detached from the policy": "mtp_detach_heads",
        "use --recompute-granularity selective --recompute-modules moe": "moe_layer_recompute",
        "set by --router-replay-mode": "moe_enable_routing_replay",
        "observability/metrics.py replaces megatron-core's timers": "barrier_with_L1_time",
        "not among the metrics": "log_num_zeros_in_grad log_max_attention_logit moe_per_layer_logging",
        "use --recompute-granularity, which applies to every micro-batch": (
            "num_microbatches_with_partial_activation_checkpoints"
        ),
        "chunks would add up the gradient of a weight in 16 bits: use --recompute-modules mlp, or lower "
        "--max-tokens-per-microbatch": "mlp_chunks_for_training",
        "megatron-core ignores it": "moe_token_dropping fp8_interval mtp_hybrid_override_pattern",
        "only megatron-core's own inference engine reads it, and --rollout-engine does not offer that engine": (
            "flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers "
            "inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents nccl_all_reduce_for_prefill "
            "inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_grouped_gemm_backend "
            "inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type "
            "moe_pad_experts_for_cuda_graph_inference"
        ),
        "for megatron-core's own tests": "test_mode",
        "set by --hybrid-layer-pattern": "hetereogenous_dist_checkpoint",
        "this program's Mamba-2 layer has initial weights of its own, float32 states and no fused kernel": (
            "is_hybrid_model mamba_training_ssm_states_dtype use_mamba_mem_eff_path"
        ),
        "layers are described by --hybrid-layer-pattern, --moe-layer-freq and --linear-attention-freq": (
            "heterogeneous_block_specs"
        ),
        "only recipes of FP8 that --fp8-recipe refuses read it": (
            "fp8_quantizer_factory fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad tp_only_amax_red "
            "reuse_grad_buf_for_mxfp8_param_ag"
        ),
        "the core of attention is not computed in FP8": "fp8_dot_product_attention fp8_multi_head_attention",
        "training in 4 bits is not supported": "fp4_recipe fp4_quantizer_factory",
        "it rounds the activation's input to 8 bits without a scale": "activation_func_fp8_input_store",
        "only the dispatchers allgather and alltoall are supported": (
            "moe_deepep_num_sms moe_hybridep_num_sms moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms "
            "moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_hybridep_num_blocks_permute "
            "moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape "
            "moe_ncclep_zero_copy moe_expert_rank_capacity_factor moe_paged_stash moe_paged_stash_page_size "
            "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu"
        ),
        "needs Transformer Engine 2.14; the tests ran with 2.11": (
            "use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert "
            "moe_single_grouped_weight moe_single_grouped_bias"
        ),
        "import, export and weight sync expect all rows of a gate before the rows that it multiplies": (
            "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size"
        ),
        "tokens are never dropped, because the engine drops none": "moe_token_drop_policy",
        "it routes at random, and the engine does not": "moe_router_force_biased",
        "only --moe-router-load-balancing-type quantile_balancing reads it, which moves a bias that the engine does "
        "not have": "moe_router_quantile_balancing_ema",
        "use --moe-router-num-groups and --moe-router-group-topk": "moe_router_topk_limited_devices",
        "use --hybrid-context-parallel with --max-tokens-per-microbatch, which has a schedule of its own": (
            "hybrid_context_parallel max_seqlen_per_dp_cp_rank"
        ),
        "megatron-core's combined schedule computes another loss than GRPO's": (
            "ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream"
        ),
        "megatron-core reduces the delayed gradients with Megatron FSDP only, which is not supported": (
            "overlap_dispatch_backward_with_experts_wgrad"
        ),
        "sparse attention is not supported": (
            "experimental_attention_variant_loss_scale_func dsa_indexer_n_heads "
            "dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset "
            "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved "
            "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32"
        ),
        "Megatron-LM's training loop applies it, megatron-core does not": (
            "qk_clip qk_clip_alpha qk_clip_threshold batch_invariant_mode optimizer_cuda_graph"
        ),
        "use --ddp-bucket-size; Megatron-LM's training loop computes that size from it": "num_buckets",
        "use --on-bad-update skip --bad-update-factor, which compares with earlier updates": "grad_norm_skip_threshold",
        "needs NVIDIA's unpublished kitchen extension": ("use_kitchen use_kitchen_attention kitchen_attention_backend"),
        "needs Transformer Engine's user buffers, which the program does not set up": (
            "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
            "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs "
            "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend"
        ),
        "megatron-core's graphs refuse packed batches; use --cuda-graphs": (
            "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_modules "
            "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps "
            "use_te_rng_tracker delay_offload_until_cuda_graph"
        ),
        "Transformer Engine then refuses tensors of other sizes than in the first pass, and packs differ in length": (
            "cpu_offloading_retain_pinned_cpu_buffers"
        ),
        "megatron-core divides by the bytes of its first pass, which often computes log-probabilities and stores none: "
        "use --offload-modules": "activation_offload_fraction delta_offload_bytes_across_pp_ranks",
        "its float32 copies lie outside the buffers that --offload-gradients frees, and need more memory than "
        "--accumulate-allreduce-grads-in-fp32, the default": "param_name_patterns_for_fp32_local_accumulation",
        "needs a build of torch with ring_exchange": "use_ring_exchange_p2p",
        "the backend is NCCL or gloo, with one data-parallel group per optimizer": (
            "pipeline_model_parallel_comm_backend num_distributed_optimizer_instances"
        ),
        "needs Transformer Engine 2.19, and import, export and weight sync read whole shards": (
            "tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards "
            "expert_gtp_weight_remat_size"
        ),
        "Megatron FSDP is not supported": (
            "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
            "gradient_reduce_div_fusion suggested_communication_unit_size keep_fp8_transpose_cache fsdp_double_buffer "
            "fsdp_manual_registration fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync "
            "init_model_with_meta_device megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype "
            "megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
            "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer"
        ),
        "only the optimizers Adam and SGD are supported": (
            "muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type "
            "muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2 "
            "soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method "
            "adaptive_muon_beta2 adaptive_muon_eps use_layer_wise_distributed_optimizer"
        ),
    }.items()
    for field in fields.split()
}

# Flags of Megatron-LM scripts without an effect here: (takes a value, why they may stay in a script).
ACCEPTED: dict[str, tuple[bool, str]] = {
    "--use-mcore-models": (False, "megatron-core's models are the only ones"),
    "--use-flash-attn": (False, "packed batches always take a flash kernel on a GPU"),
    "--use-rotary-position-embeddings": (False, "rotary embeddings are the only ones"),
    "--no-position-embedding": (False, "rotary embeddings are the only ones"),
    "--attention-softmax-in-fp32": (False, "the attention kernels always compute it in float32"),
    "--no-masked-softmax-fusion": (False, "the attention kernels compute the softmax themselves"),
    "--no-persist-layer-norm": (False, "the persistent kernel of apex is not used"),
    "--no-async-tensor-model-parallel-allreduce": (False, "megatron-core has no such setting any more"),
    "--cross-entropy-loss-fusion": (False, "the head computes log-probabilities in chunks, with its own backward"),
    "--log-entropy": (False, "the entropy over the vocabulary is always reported"),
    "--cross-entropy-fusion-impl": (True, "the head computes log-probabilities in chunks, with its own backward"),
}

# Fields that work with --transformer-impl transformer_engine only.
NEED_TRANSFORMER_ENGINE = (
    "apply_rope_fusion cpu_offloading disable_parameter_transpose_cache fine_grained_activation_offloading "
    "fused_single_qkv_rope moe_permute_fusion moe_router_fusion symmetric_ar_type use_te_activation_func"
).split()
