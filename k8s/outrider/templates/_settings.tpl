{{/*
The settings: what values.yaml says, and what the chart decides, because it makes the ports, mounts and groups. The same tree goes
to the RayService, as the arguments of cluster.app:build, and to the ConfigMap, which `outrider plan` reads.
*/}}
{{- define "outrider.settings" -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $server := $settings.server | default dict -}}
{{- $keys := or .Values.apiKeys.secretName $server.api_key_hashes -}}
{{- $own := dict
  "cache_dir" .Values.storage.mountPath
  "drafting_dir" "/tmp/outrider"
  "cluster" (dict "placement" (dict "router" "outrider_router" "drafter" "outrider_drafting" "retrieval" "outrider_drafting" "verifier" "outrider_verifier" "stages" "STRICT_PACK"))
  "server" (dict "host" (empty $keys | ternary "127.0.0.1" "0.0.0.0") "port" (include "outrider.grpcPort" . | int) "ops_host" "0.0.0.0" "ops_port" 9464)
  "router" (dict "max_replicas_per_node" 1)
  "drafter" (dict "host" "0.0.0.0" "max_replicas_per_node" 1)
-}}
{{- if .Values.service.http -}}
{{- $_ := set $own.server "http_port" (include "outrider.httpPort" . | int) -}}
{{- else -}}
{{- $_ := set $own.server "http_port" nil -}}
{{- end -}}
{{- if not (hasKey $server "drain_delay_s") -}}
{{- $_ := set $own.server "drain_delay_s" 15 -}}
{{- end -}}
{{- if .Values.apiKeys.secretName -}}
{{- $_ := set $own.server "keys_file" (printf "/etc/outrider/keys/%s" .Values.apiKeys.secretKey) -}}
{{- end -}}
{{- if .Values.tls.secretName -}}
{{- $_ := merge $own.server (dict "tls_certificate" "/etc/outrider/tls/tls.crt" "tls_key" "/etc/outrider/tls/tls.key") -}}
{{- end -}}
{{- if and .Values.gateway.hostnames (not $server.http_hosts) -}}
{{- $_ := set $own.server "http_hosts" .Values.gateway.hostnames -}}
{{- end -}}
{{- if .Values.internalToken.secretName -}}
{{- $_ := set $own "internal_token_file" (printf "/etc/outrider/internal-token/%s" .Values.internalToken.secretKey) -}}
{{- end -}}
{{- if .Values.componentTls.verifier -}}
{{- $_ := set $own.cluster "tls" (dict "certificate" "/etc/outrider/component-tls/{role}/tls.crt" "key" "/etc/outrider/component-tls/{role}/tls.key" "ca" "/etc/outrider/component-tls/{role}/ca.crt") -}}
{{- end -}}
{{- if include "outrider.hasIndex" . -}}
{{- $_ := set $own "retrieval" (dict "host" "0.0.0.0" "max_replicas_per_node" 1) -}}
{{- end -}}
{{- $verifier := include "outrider.verifierPods" . | fromJson -}}
{{- if gt (int $verifier.podsPerReplica) 1 -}}
{{- $_ := set $own "verifier" (dict "stage_host" "0.0.0.0") -}}
{{- $_ := set $own.cluster.placement "stages" "PACK" -}}
{{- end -}}
{{- mustMergeOverwrite $settings $own | toYaml -}}
{{- end -}}

{{/* Name of the application on Ray. */}}
{{- define "outrider.application" -}}
{{ (.Values.settings.cluster | default dict).name | default "outrider" }}
{{- end -}}

{{- define "outrider.grpcPort" -}}
{{ (.Values.settings.server | default dict).port | default 50051 | int }}
{{- end -}}

{{- define "outrider.httpPort" -}}
{{ (.Values.settings.server | default dict).http_port | default 8000 | int }}
{{- end -}}

{{/* "true" where there is a retrieval index; else empty. */}}
{{- define "outrider.hasIndex" -}}
{{- $retrieval := .Values.settings.retrieval | default dict -}}
{{- if or $retrieval.index $retrieval.redis_url .Values.indexRedis.urlSecretName .Values.redis.index -}}true{{- end -}}
{{- end -}}

{{/* Fewest and most replicas of a component, as JSON; with its settings. */}}
{{- define "outrider.replicas" -}}
{{- $scaling := .autoscaling | default dict -}}
{{- if .autoscaling -}}
{{- dict "min" ($scaling.min_replicas | default 1) "max" $scaling.max_replicas | toJson -}}
{{- else -}}
{{- dict "min" (.replicas | default 1) "max" (.replicas | default 1) | toJson -}}
{{- end -}}
{{- end -}}

{{/* How replicas of the verifier and pods with GPUs divide: replicasPerPod or podsPerReplica is 1. */}}
{{- define "outrider.verifierPods" -}}
{{- $settings := .Values.settings.verifier | default dict -}}
{{- $gpus := .Values.groups.verifier.gpus | int -}}
{{- $wanted := mulf ($settings.stages | default 1) ($settings.tensor_parallel_size | default 1) ($settings.num_gpus | default 0) -}}
{{- if or (eq $gpus 0) (eq $wanted 0.0) -}}
{{- dict "replicasPerPod" 1 "podsPerReplica" 1 | toJson -}}
{{- else if le $wanted (float64 $gpus) -}}
{{- dict "replicasPerPod" (max 1 (floor (divf $gpus $wanted) | int)) "podsPerReplica" 1 | toJson -}}
{{- else -}}
{{- dict "replicasPerPod" 1 "podsPerReplica" (ceil (divf $wanted $gpus) | int) | toJson -}}
{{- end -}}
{{- end -}}

{{/* Fewest and most pods of a worker group, as JSON; with (list . "group"). */}}
{{- define "outrider.pods" -}}
{{- $root := first . -}}
{{- $group := last . -}}
{{- $settings := $root.Values.settings -}}
{{- $of := include "outrider.replicas" (get $settings ($group | replace "drafting" "drafter") | default dict) | fromJson -}}
{{- if eq $group "verifier" -}}
{{- $per := include "outrider.verifierPods" $root | fromJson -}}
{{- range $end := list "min" "max" -}}
{{- $_ := set $of $end (mulf (ceil (divf (get $of $end) $per.replicasPerPod)) $per.podsPerReplica | int) -}}
{{- end -}}
{{- else if and (eq $group "drafting") ($settings.drafter | default dict).address -}}
{{- /* It runs elsewhere, with its index. */ -}}
{{- $of = dict "min" 0 "max" 0 -}}
{{- else if and (eq $group "drafting") (include "outrider.hasIndex" $root) -}}
{{- $lookups := include "outrider.replicas" ($settings.retrieval | default dict) | fromJson -}}
{{- range $end := list "min" "max" -}}
{{- $_ := set $of $end (max (get $of $end) (get $lookups $end)) -}}
{{- end -}}
{{- end -}}
{{- toJson $of -}}
{{- end -}}

{{/* "true" where settings let a number of replicas follow the load. */}}
{{- define "outrider.scales" -}}
{{- range $component := list "router" "drafter" "retrieval" "verifier" -}}
{{- if (get $.Values.settings $component | default dict).autoscaling -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Seconds in which a pod of a group ends, as JSON; with (list . "group"). `leave`: its router's streams end, in preStop. `drain`: the
longest that Ray then moves what else runs there; it ends as soon as nothing does. `grace`: the kubelet waits for both. All follow
from settings. Where a whole set of pods goes, verifiers have nowhere to go, and last as long as the routers' streams, as does the
head, without which no router can leave.
*/}}
{{- define "outrider.ending" -}}
{{- $settings := (first .).Values.settings -}}
{{- $server := $settings.server | default dict -}}
{{- $verifier := $settings.verifier | default dict -}}
{{- $streams := addf (hasKey $server "drain_delay_s" | ternary $server.drain_delay_s 15) (hasKey $server "drain_grace_s" | ternary $server.drain_grace_s 300) 15 | ceil | int -}}
{{- $leave := 0 -}}
{{- $drain := 50 -}}
{{- if eq (last .) "router" -}}
{{- $leave = $streams -}}
{{- $drain = 10 -}}
{{- else if has (last .) (list "verifier" "head") -}}
{{- $drain = max $streams (addf (hasKey $verifier "drain_s" | ternary $verifier.drain_s 30) 20 | ceil | int) -}}
{{- end -}}
{{- dict "leave" $leave "drain" $drain "grace" (add $leave $drain (eq (last .) "router" | ternary 5 10)) | toJson -}}
{{- end -}}
