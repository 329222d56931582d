# hyscale.c: make finds what this machine has, says so, and builds what it can.
#
#   make            everything this machine can build
#   make run        build and start the default training
#   make test       build and run all tests this machine can run (a few minutes)
#   make cuda-all   compile the CUDA trainer for every architecture it claims (sm_80, sm_90a, sm_100), its benchmark, the lessons of dev/cuda
#   make test-gpu   the CUDA trainer against the reference (needs a GPU); make build/lesson_NAME builds dev/cuda/NAME.cu
#   make test-long  the trainings that prove it learns (a quarter of an hour on two cores)
#   make bench      the measured tables of dev/bench (make build/bench_attention: the GPU's attention)
#   make clean
#
# Variables: CC=clang  SANITIZE=1 (address and undefined-behaviour checks)  BLAS=1 (matrix products by cblas)
#            OMP=0 (no threads)  REAL=double  PRECISION=fp32 (CUDA trainer)  ARGS="--steps 2000" (for make run)

CC ?= cc
BUILD ?= build
ARGS ?=
SHELL := /bin/sh

# A probe compiles and links a small program with the flags in question: what counts is that it works.
probe = $(shell mkdir -p $(BUILD); printf '%s\n' '$(1)' > $(BUILD)/probe.c; $(CC) $(BUILD)/probe.c -o $(BUILD)/probe.out $(2) >/dev/null 2>&1 && echo yes; rm -f $(BUILD)/probe.c $(BUILD)/probe.out)
hash := \#

HAVE_CC := $(call probe,int main(void){return 0;},-lm)
ifneq ($(HAVE_CC),yes)
$(error '$(CC)' does not build a C program: install gcc or clang (Debian, Ubuntu: apt-get install gcc make))
endif
HAVE_OMP := $(if $(filter 0,$(OMP)),,$(call probe,int main(void){return omp_get_max_threads() < 1;},-fopenmp -include omp.h))
HAVE_NATIVE := $(call probe,int main(void){return 0;},-march=native)
HAVE_CBLAS := $(call probe,int main(void){return 0;},-include cblas.h -lopenblas)
NVCC := $(shell command -v nvcc 2>/dev/null)
HAVE_NCCL := $(call probe,int main(void){return 0;},-lnccl)

CFLAGS ?= -O3 -g
ALL_CFLAGS = -std=gnu99 $(CFLAGS) -Wall -Wextra -fno-math-errno -ffp-contract=fast $(if $(HAVE_NATIVE),-march=native) $(if $(HAVE_OMP),-fopenmp,-Wno-unknown-pragmas)
GIT_HASH := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
ALL_CFLAGS += -DGIT_HASH='"$(GIT_HASH)"'
LIBS = -lm
ifeq ($(SANITIZE),1)
BUILD := $(BUILD)/sanitize
ALL_CFLAGS += -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif
ifeq ($(BLAS),1)
ifneq ($(HAVE_CBLAS),yes)
$(error BLAS=1: no working cblas.h and -lopenblas (Debian, Ubuntu: apt-get install libopenblas-dev))
endif
ALL_CFLAGS += -DUSE_BLAS
LIBS += -lopenblas
endif
ifdef REAL
ALL_CFLAGS += -DREAL=$(REAL)
endif

SOURCES = train_cpu.c $(wildcard data/*.h dev/test/*.h)
TESTS = test_safetensors test_tokens test_oracle test_oracle_double test_gradients test_letters test_selection test_model
TRAINER = $(if $(filter 1,$(SANITIZE)),$(BUILD)/train_cpu,train_cpu)

# The CUDA trainer, for this machine's GPU, or for Hopper when there is none to ask.
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
SM := $(if $(CAPABILITY),$(if $(filter 90,$(CAPABILITY)),90a,$(CAPABILITY)),90a)
CUDA_TRAINER := $(if $(NVCC),train_gpt_sparse)
# bf16 is the default; PRECISION=fp32 builds the program that agrees with the reference to rounding.
PRECISION ?= bf16
cuda_flags = $(if $(filter fp32,$(2)),-DPRECISION_FP32) -std=c++17 -O3 -lineinfo -gencode=arch=compute_$(1),code=sm_$(1) -diag-suppress=177,20280 \
	-Xcompiler -O3,-fno-math-errno,-ffp-contract=fast$(if $(HAVE_NATIVE),$(comma)-march=native)$(if $(HAVE_OMP),$(comma)-fopenmp) -DGIT_HASH='"$(GIT_HASH)"'
comma := ,
CUDA_LIBS = -lcublasLt

.PHONY: all found run test test-long test-gpu cuda-all bench clean
all: found $(TRAINER) $(CUDA_TRAINER)
	@echo "built      $(addprefix ./,$(TRAINER) $(CUDA_TRAINER))   (make run trains, make test checks)"

found:
	@echo "compiler   $(CC), $(shell $(CC) --version | head -n 1)"
	@echo "OpenMP     $(if $(HAVE_OMP),yes: all cores,no: one core (gcc has it; macOS: brew install libomp))"
	@echo "vectors    $(if $(HAVE_NATIVE),-march=native,compiler default: -march=native does not work here)"
	@echo "cblas      $(if $(HAVE_CBLAS),found$(if $(filter 1,$(BLAS)),: in use, not used: BLAS=1 asks for it),not found: the own matrix product is used)"
	@echo "nvcc       $(if $(NVCC),$(NVCC)$(comma) for sm_$(SM)$(if $(CAPABILITY),, (no GPU to ask)),not found: CPU trainer only)"
	@echo "NCCL       $(if $(HAVE_NCCL),found,not found)"

$(TRAINER): $(SOURCES) Makefile
	@mkdir -p $(BUILD)
	$(CC) $(ALL_CFLAGS) -o $@ train_cpu.c $(LIBS)

train_gpt_sparse: train_gpt_sparse.cu $(SOURCES) Makefile $(BUILD)/precision_$(PRECISION)
	$(NVCC) $(call cuda_flags,$(SM),$(PRECISION)) -o $@ $< $(CUDA_LIBS)

# Changes when PRECISION does, so that the trainer is built again.
$(BUILD)/precision_$(PRECISION):
	@mkdir -p $(BUILD)
	@rm -f $(BUILD)/precision_*
	@touch $@

$(BUILD)/test_gpt_sparse_%: test_gpt_sparse.cu train_gpt_sparse.cu $(SOURCES) Makefile
	@mkdir -p $(BUILD)
	$(NVCC) $(call cuda_flags,$(SM),$*) -o $@ $< $(CUDA_LIBS)

$(BUILD)/test_oracle_cuda_%: dev/test/test_oracle.c train_gpt_sparse.cu $(SOURCES) Makefile
	@mkdir -p $(BUILD)
	$(NVCC) $(call cuda_flags,$(SM),$*) -x cu -DORACLE_CUDA -o $@ $< $(CUDA_LIBS)

# The lessons: one file a kernel, from the plain to the fast, each verified and timed.
$(BUILD)/lesson_%: dev/cuda/%.cu $(wildcard dev/cuda/*.h) Makefile
	@mkdir -p $(BUILD)
	$(NVCC) $(call cuda_flags,$(SM)) -o $@ $< $(CUDA_LIBS)

# Measurements of the trainer's own kernels (bf16).
$(BUILD)/bench_%: dev/bench/bench_%.cu train_gpt_sparse.cu $(SOURCES) Makefile
	@mkdir -p $(BUILD)
	$(NVCC) $(call cuda_flags,$(SM),bf16) -o $@ $< $(CUDA_LIBS)

cuda-all:
	@mkdir -p $(BUILD)
	@for sm in 80 90a 100; do echo "compiling train_gpt_sparse.cu for sm_$$sm"; \
	$(NVCC) $(call cuda_flags,$$sm,bf16) -o $(BUILD)/train_gpt_sparse_$$sm train_gpt_sparse.cu $(CUDA_LIBS) || exit 1; done
	@echo "compiling train_gpt_sparse.cu for sm_90a, PRECISION=fp32"
	@$(NVCC) $(call cuda_flags,90a,fp32) -o $(BUILD)/train_gpt_sparse_fp32 train_gpt_sparse.cu $(CUDA_LIBS)
	@for file in test_gpt_sparse.cu $(wildcard dev/bench/*.cu); do echo "compiling $$file for sm_90a"; \
	$(NVCC) $(call cuda_flags,90a,bf16) -o $(BUILD)/$$(basename $$file .cu)_90a $$file $(CUDA_LIBS) || exit 1; done
	@for lesson in $(basename $(notdir $(wildcard dev/cuda/*.cu))); do for sm in 80 90a; do echo "compiling dev/cuda/$$lesson.cu for sm_$$sm"; \
	$(NVCC) $(call cuda_flags,$$sm) -o $(BUILD)/lesson_$${lesson}_$$sm dev/cuda/$$lesson.cu $(CUDA_LIBS) || exit 1; done; done

# With a GPU and nvcc the CUDA trainer on a 7M model, else the CPU trainer on a 1M model.
run: all
ifneq ($(and $(CAPABILITY),$(NVCC)),)
	./train_gpt_sparse --preset small $(ARGS)
else
	@echo "no GPU, or no nvcc: training on the CPU"
	./$(TRAINER) $(ARGS)
endif

test-gpu: $(foreach p,fp32 bf16,$(BUILD)/test_gpt_sparse_$(p) $(BUILD)/test_oracle_cuda_$(p))
	$(BUILD)/test_oracle_cuda_fp32 dev/test/oracle/*.safetensors
	$(BUILD)/test_oracle_cuda_bf16 dev/test/oracle/*.safetensors
	$(BUILD)/test_gpt_sparse_fp32
	$(BUILD)/test_gpt_sparse_bf16

# Tests include train_cpu.c and use a part of it each.
$(BUILD)/%_double: dev/test/%.c $(SOURCES) Makefile
	@mkdir -p $(BUILD)
	$(CC) $(ALL_CFLAGS) -Wno-unused-function -DREAL=double -o $@ $< $(LIBS)
$(BUILD)/test_gradients $(BUILD)/test_letters: ALL_CFLAGS += -DREAL=double
$(BUILD)/%: dev/test/%.c $(SOURCES) Makefile
	@mkdir -p $(BUILD)
	$(CC) $(ALL_CFLAGS) -Wno-unused-function -o $@ $< $(LIBS)

test: all $(TESTS:%=$(BUILD)/%)
	@BUILD=$(BUILD) TRAINER=./$(TRAINER) CC="$(CC)" sh dev/test/run.sh

test-long: all
	@BUILD=$(BUILD) TRAINER=./$(TRAINER) sh dev/test/long.sh

bench: all
	sh dev/bench/bench_cpu.sh
	sh dev/bench/copy_sweep.sh dev/bench/results-cpu/copy.jsonl

clean:
	rm -rf build train_cpu train_gpt_sparse
